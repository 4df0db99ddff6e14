// An optimizer update of chunks whose states are in host memory, and who may carry it out.
//
//   executor   does one update after the other: the host's threads (host_updates.h), or the device, through which the
//              states pass (streamed_updates.h). The bits are the same (optim/kernels.h).
//   rate       parameters per second as measured, from which follows when an executor would be done with one update more
//
// An update owns nothing: its blocks must stay until its event is complete, which their records see to.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "common/event.h"
#include "common/tracing.h"
#include "optim/compute.h"

namespace patrickstar {

// out = round(in), where a parameter without a gradient has its value in what will be the gradient's place.
struct Restore {
  const float* in;
  void* out;
  DType dtype;
  int64_t numel;
};

// Values that an update apart from its states does not write: those of a parameter without a gradient.
struct Carry {
  const void* in;
  void* out;
  int64_t num_bytes;
};

struct HostUpdate {
  ChunkId chunk = -1;                // the first of those that it updates
  std::vector<optim::AdamJob> jobs;  // in host memory
  std::vector<Restore> restores;
  std::vector<Carry> carries;
  std::vector<Event> after;                            // downloads of the gradients, updates before it
  std::shared_ptr<const std::atomic<bool>> cancelled;  // nothing is done when it is true by then; may be null

  int64_t numel() const;
  bool is_cancelled() const { return cancelled != nullptr && *cancelled; }
};

// What is done before Adam, on the host wherever Adam runs.
void restore_and_carry(const HostUpdate& update, optim::Compute& host_compute);

// How a trace names an update.
SpanLabel update_label(Track track, ChunkId first_chunk, const std::vector<optim::AdamJob>& jobs);

// Around the work of an update, on the thread that does it; nothing when nobody wants to know.
class HostSpanScope {
 public:
  explicit HostSpanScope(HostSpan* span);
  ~HostSpanScope();
  HostSpanScope(const HostSpanScope&) = delete;
  HostSpanScope& operator=(const HostSpanScope&) = delete;

 private:
  HostSpan* span_;
};

// Parameters per second, recent updates counting most, and how many are waiting. Any thread may call any method.
class UpdateRate {
 public:
  explicit UpdateRate(double first_guess) : first_guess_(first_guess) {}

  void submitted(int64_t numel);
  // `seconds` is how long the executor was busy with it; 0: it was cancelled.
  void finished(int64_t numel, double seconds);
  double params_per_second() const;
  bool is_busy() const;
  // For what is waiting and `numel` more.
  double seconds_until_done(int64_t numel) const;

 private:
  double first_guess_;
  mutable std::mutex mutex_;
  int64_t waiting_ = 0;
  double params_ = 0;
  double seconds_ = 0;
};

class UpdateExecutor {
 public:
  virtual ~UpdateExecutor() = default;

  // Complete when the update is.
  virtual Event submit(HostUpdate update) = 0;
  virtual const UpdateRate& rate() const = 0;
};

}  // namespace patrickstar
