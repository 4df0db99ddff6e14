// Optimizer updates on the device of chunks whose states stay on the host: piece by piece, states and gradient go up into
// staging buffers, Adam runs there, and states and parameters come down again. To everybody else it is an update in host
// memory like any other.
//
// It takes 14 bytes per parameter up and as many down, on queues of its own, where the host's threads take none: worth it
// when they cannot keep up. Several buffers keep both directions and Adam busy at once.
//
//   StreamedUpdates updates(...);
//   if (updates.open(bytes)) record.host_ready = updates.submit(update);
//   updates.close();   // waits for what was submitted, gives the buffers back
//
// open() and close() are guarded by the runtime's lock. [Note: who waits for a streamed update] A thread of its own waits
// for the gradients' downloads and for a buffer, a second one for the last piece's way down; neither takes the lock, so
// whoever holds it may wait for them.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "backend/backend.h"
#include "common/queue_delays.h"
#include "common/work_queue.h"
#include "memory/slot_pool.h"
#include "runtime/update_executor.h"

namespace patrickstar {

// Jobs next to each other in one chunk's arrays, which pass through one buffer together.
struct UpdateWindow {
  optim::AdamRange span;             // in host memory, from the first element to the last
  std::vector<optim::AdamJob> jobs;  // in the order of their elements
};

// Elements of states, gradient and parameter that `num_bytes` hold. The parameter takes the gradient's place if it can.
int64_t window_capacity(int64_t num_bytes, DType grad_dtype, DType param_dtype);

// Splits jobs into windows of at most what a buffer of `buffer_bytes` holds. A window reaches over the gaps that align
// parameters, not over a parameter.
std::vector<UpdateWindow> split_into_windows(const std::vector<optim::AdamJob>& jobs, int64_t buffer_bytes);

class StreamedUpdates final : public UpdateExecutor {
 public:
  static constexpr int kNumBuffers = 4;

  StreamedUpdates(Backend& backend, optim::Compute& host_compute, optim::Compute& device_compute, SlotPool& slots,
                  Tracer& tracer, QueueDelays& delays);
  ~StreamedUpdates() override;

  // Takes staging buffers of so many bytes each. False when the device has no room for them.
  bool open(int64_t buffer_bytes);
  void close();
  bool is_open() const { return static_cast<bool>(buffers_.front().slot); }

  Event submit(HostUpdate update) override;
  const UpdateRate& rate() const override { return rate_; }

 private:
  struct Buffer {
    Slot slot;
    Event done;  // the way down of what was in it last
  };
  struct Running {
    HostUpdate update;
    std::shared_ptr<HostSpan> span;
    std::shared_ptr<HostEvent> done;
    TraceClock::time_point begin = {};
  };

  void run(Running& running);
  void pass(const UpdateWindow& window, Buffer& buffer);
  void finish(Running& running, const Event& last_piece);

  Backend& backend_;
  optim::Compute& host_compute_;
  optim::Compute& device_compute_;
  SlotPool& slots_;
  Tracer& tracer_;
  QueueDelays& delays_;
  UpdateRate rate_;
  std::array<Buffer, kNumBuffers> buffers_;
  size_t next_buffer_ = 0;                     // of the first thread
  TraceClock::time_point last_finished_ = {};  // of the second
  WorkQueue finisher_;
  WorkQueue queue_;
};

}  // namespace patrickstar
