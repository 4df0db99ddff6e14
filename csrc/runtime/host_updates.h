// Optimizer updates of chunks whose states are in host memory: on the host's threads, beside everything else, on a queue
// of their own, one after the other, each on all threads of the pool.
//
//   Event done = updates.submit({chunk, jobs, restores, carries, {gradient.host_ready}});
//   record.host_ready = done;   // whoever reads the block waits for it
//
// An update owns nothing: its blocks must stay until its event is over, which their records see to. One whose gradient
// did not come down fails with the download, and leaves its states as they were.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "backend/backend.h"
#include "common/tracing.h"
#include "common/work_queue.h"
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

  bool is_cancelled() const { return cancelled != nullptr && *cancelled; }
};

// How a trace names an update.
SpanLabel update_label(Track track, ChunkId first_chunk, const std::vector<optim::AdamJob>& jobs);

class HostUpdates {
 public:
  HostUpdates(Backend& backend, optim::Compute& compute, Tracer& tracer)
      : backend_(backend), compute_(compute), tracer_(tracer) {}

  // Complete when the update is.
  Event submit(HostUpdate update);

 private:
  void run(const HostUpdate& update, HostSpan* span);

  Backend& backend_;
  optim::Compute& compute_;
  Tracer& tracer_;
  WorkQueue queue_;
};

}  // namespace patrickstar
