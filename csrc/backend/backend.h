// The backend: device memory, ordered copies, events and the accounting of activation memory. `make_cpu_backend`
// simulates a device in host memory; `make_cuda_backend` drives a GPU.
//
// Work of one queue runs in order. Work of different queues is ordered by events only.
//
// Any thread may call every method except the destructor. Calls are serialised by the runtime's lock unless stated
// otherwise.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>

#include "common/device_allocator.h"
#include "common/event.h"
#include "common/pressure_gate.h"
#include "common/tracing.h"

namespace patrickstar {

// On the CPU, every queue but kCompute is a worker thread and device memory is host memory with a limit.
enum class Queue {
  kCompute,          // the model. CUDA: the stream of the last follow_compute(); CPU: the calling thread
  kUpload,           // host to device copies
  kDownload,         // device to host copies
  kGather,           // all-gathers of parameters (engine/collectives.h)
  kScatter,          // reduce-scatters of gradients
  kRoundTripUp,      // GPU round-trip updates (engine/round_trips.h): states host to device
  kRoundTripUpdate,  // their updates
  kRoundTripDown     // their states device to host
};
constexpr int kNumQueues = 8;

enum class LimitPolicy {
  kEnforce,  // refuse the allocation: out of memory in the operation that allocates
  kMeasure,  // let the allocation pass where the device can, and record the excess (`least_limit_bytes`)
  kLifted,   // the memory is lent: no limit, and no record
};

constexpr int64_t kUnlimited = INT64_MAX;

// Remedies for errors that the device's memory is too small: in a training step, and elsewhere.
constexpr const char* kCheckpointOrSmallerBatch =
    "turn on activation checkpointing if it is off (model.gradient_checkpointing_enable()), lower the batch size";
constexpr const char* kSmallerBatch = "lower the batch size";

class Backend : public DeviceAllocator {
 public:
  virtual const char* name() const = 0;
  // Restores PyTorch's allocator and its limits, as the destructor does. All device buffers must be free.
  virtual void shut_down() = 0;

  // Copies on `queue`. Both ranges must stay valid until an event recorded after the copy is complete.
  virtual void copy(Queue queue, void* to, const void* from, int64_t num_bytes) = 0;
  virtual void fill_zero(Queue queue, void* data, int64_t num_bytes) = 0;
  // CUDA: calls `task` now; its kernels go to the queue's stream. CPU: the queue's thread runs `task` later.
  virtual void enqueue(Queue queue, std::function<void()> task) = 0;

  // Makes the calling thread's current CUDA stream the compute queue. The new stream first waits for the work that the
  // previous compute stream has so far. Uses of chunks by several user streams therefore run in the order of their
  // enqueueing, and a wait for the compute queue covers all of them. Do not call it from a stream that only copies (a
  // prefetcher) or from inside PyTorch's allocator.
  virtual void follow_compute() = 0;

  // Keeps `queue` busy for `seconds`. Used by backend/delaying_backend.h.
  virtual void delay(Queue queue, double seconds) = 0;

  virtual Event record(Queue queue) = 0;
  // Later work of `queue` starts after `event`. Blocks the caller on the CPU's compute queue, and on CUDA for a host
  // event; a blocking call throws the failure of the work before the event.
  virtual void wait(Queue queue, const Event& event) = 0;
  // Any thread may call the next four methods at any time.
  // Blocks until the work before `event` is done. Throws that work's failure.
  virtual void synchronize(const Event& event) = 0;
  // Blocks until the work before `event` has ended or failed. Its memory may be used again (see `HostEvent`).
  virtual void settle(const Event& event) noexcept = 0;
  virtual bool is_over(const Event& event) = 0;
  // Blocks until all work of the queue is over. Allocates nothing.
  virtual void drain(Queue queue) noexcept = 0;
  // True if wait(kUpload or kDownload, event) would block the caller. On CUDA a stream cannot wait for a host event.
  virtual bool waits_on_host(const Event& event) = 0;

  // For traces: an event that records the time at which the queue reached it. seconds_between() waits for both marks;
  // they may belong to different queues.
  virtual Mark mark(Queue queue) = 0;
  virtual double seconds_between(const Mark& begin, const Mark& end) = 0;

  // Page-locks host memory for asynchronous copies.
  virtual void pin(void* data, int64_t num_bytes) = 0;
  // The function that undoes pin(). Any thread may call it, also after the backend is destroyed. Empty if there is
  // nothing to undo.
  virtual std::function<void(void* data, int64_t num_bytes)> unpinner() const = 0;

  // True if take_activation_peak() is cheap and has no side effect. On CUDA it resets PyTorch's peak statistics.
  virtual bool measures_activation_memory_freely() const = 0;
  // True if device buffers can use memory between activations and give it back within a step. PyTorch's caching
  // allocator would have to map and unmap segments for that, so on CUDA chunk buffers get what the highest activation
  // memory leaves.
  virtual bool follows_activations() const = 0;
  // Device memory used by everything but device buffers: now, and the highest since the last call.
  virtual int64_t activation_bytes() = 0;
  virtual int64_t take_activation_peak() = 0;
  // Highest activation memory in use since the last call, without memory that a cache keeps.
  virtual int64_t take_live_activation_peak() = 0;
  // Highest sum of device buffers and activation memory since reset_peak().
  virtual int64_t peak_bytes() = 0;
  virtual void reset_peak() = 0;
  // The least limit that would have sufficed for all work under LimitPolicy::kMeasure: the highest sum of activation
  // memory and chunk buffers in use. 0 if nothing exceeded the limit, and on backends that cannot exceed it.
  virtual int64_t least_limit_bytes() = 0;
  virtual void reset_least_limit() = 0;
  // Records that `num_bytes` of chunk buffers would have to fit beside the present activation memory.
  virtual void note_needed_chunk_buffers(int64_t num_bytes) = 0;

  // Returns cached free memory to the device. Slow; call it after a failed allocation.
  virtual void reclaim() = 0;
  // Bytes that reclaim() would return.
  virtual int64_t reclaimable_bytes() const = 0;

  virtual int64_t limit_bytes() const = 0;
  // True if allocations under LimitPolicy::kMeasure may exceed the limit.
  virtual bool may_exceed_limit() const = 0;
  virtual void set_limit_policy(LimitPolicy policy) = 0;
  virtual void set_pressure_handler(PressureHandler* handler) = 0;
};

// Guards calls on one queue whose memory is protected by an event recorded at the end. If a call throws before
// record(), the destructor waits for the work that was enqueued.
class QueueGuard {
 public:
  QueueGuard(Backend& backend, Queue queue) : backend_(&backend), queue_(queue) {}
  ~QueueGuard() {
    if (backend_ != nullptr) backend_->drain(queue_);
  }
  QueueGuard(const QueueGuard&) = delete;
  QueueGuard& operator=(const QueueGuard&) = delete;

  // Records the protecting event and ends the guard.
  Event record() {
    Event event = backend_->record(queue_);
    release();
    return event;
  }
  // Ends the guard; an event of another queue covers the work.
  void release() { backend_ = nullptr; }

 private:
  Backend* backend_;
  Queue queue_;
};

// `limit_bytes` may be kUnlimited. The simulated device starts with `left_by_activations_bytes` beside the limit that
// activations have left for gradients (memory/activation_memory.h). With `follows_activations` false it behaves like
// CUDA. Throws SystemError if the device cannot be used.
std::unique_ptr<Backend> make_cpu_backend(int64_t limit_bytes, int64_t left_by_activations_bytes = 0,
                                          bool follows_activations = true);
#ifdef PATRICKSTAR_WITH_CUDA
// PyTorch's allocator may reserve up to `rounding_bytes` more than its own limit.
std::unique_ptr<Backend> make_cuda_backend(int device, int64_t limit_bytes, int64_t rounding_bytes);
#endif

// Device memory that belongs to no engine. It carries chunk values from one engine's core to the next. The compute
// queue may use it; free it when no work uses it any more. The simulated device does not count it. On CUDA it comes
// from cached memory of device buffers and returns there. While any is held, a new backend keeps PyTorch's cache:
// returning gigabytes to the driver and mapping them again takes seconds. Throws MemoryBudgetError if there is no room.
std::shared_ptr<void> take_cpu_memory(int64_t num_bytes);
#ifdef PATRICKSTAR_WITH_CUDA
std::shared_ptr<void> take_cuda_memory(int device, int64_t num_bytes);
#endif

}  // namespace patrickstar
