// The backend: device memory, ordered copies, events, and the tide. One interface, two devices.
//
//   kCompute   where the model runs. On CUDA the stream that follow_compute() has found last; on the CPU the calling
//              thread itself.
//   kUpload    host to device copies, in order
//   kDownload  device to host copies, in order
//   kGather    collectives of values, in order (engine/collectives.h)
//   kScatter   collectives of gradients, in order
//   kVisitUp, kVisitUpdate, kVisitDown
//              states of chunks that are at home on the host go up, are updated and come down (engine/visits.h)
//
// Work of one queue runs in order; work of different queues is ordered by events only. [Note: queues]
// On the CPU, all but kCompute are worker threads and the "device" is ordinary memory with a
// simulated limit, so the same ordering mistakes show on any machine.
//
// All methods but the destructor may be called from any thread; unless said otherwise one at a time (the runtime's
// lock).
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

enum class Queue { kCompute, kUpload, kDownload, kGather, kScatter, kVisitUp, kVisitUpdate, kVisitDown };
constexpr int kNumQueues = 8;

// What to do when the tide and the payloads in use exceed the limit.
enum class LimitPolicy {
  kEnforce,  // refuse the allocation (an out-of-memory error in the operation that asked)
  kMeasure,  // allow it where the device can, and remember the excess: who asks for the least limit then refuses
};

constexpr int64_t kUnlimited = INT64_MAX;

class Backend : public DeviceAllocator {
 public:
  virtual const char* name() const = 0;
  // Undoes what the backend changed in PyTorch (allocator, limits), as its destructor does. All slots must be free.
  virtual void shut_down() = 0;

  // Copies on `queue`. The ranges must stay valid until an event recorded after it is complete.
  virtual void copy(Queue queue, void* to, const void* from, int64_t num_bytes) = 0;
  virtual void fill_zero(Queue queue, void* data, int64_t num_bytes) = 0;
  // Device compute that `task` starts belongs to `queue`. On the CPU the task itself runs there, later.
  virtual void enqueue(Queue queue, std::function<void()> task) = 0;

  // [Note: one compute queue] The calling thread computes: on CUDA its current stream is the compute queue from here
  // on, and goes on when the stream that was so before has done its work up to now. So uses of chunks by several
  // streams of the user's are in one order, that in which they were enqueued, and whoever waits for the compute queue
  // has waited for all of them. A stream that only copies (of a prefetcher) or allocates is none of them: a thread that
  // makes room from inside PyTorch's allocator does not call this.
  virtual void follow_compute() = 0;

  // Keeps `queue` busy for so long (backend/delaying_backend.h).
  virtual void delay(Queue queue, double seconds) = 0;

  virtual Event record(Queue queue) = 0;
  // Later work of `queue` starts after `event`. On the CPU's compute queue, and for an event of the host's on CUDA,
  // this blocks the caller, and throws what the work before the event has failed with.
  virtual void wait(Queue queue, const Event& event) = 0;
  // These four may be called by any thread at any time. Blocks until the work before `event` is done; throws what it
  // has failed with.
  virtual void synchronize(const Event& event) = 0;
  // Blocks until that work is over, however it ended: its memory may be used again ([Note: failures travel with
  // events]).
  virtual void settle(const Event& event) noexcept = 0;
  virtual bool is_over(const Event& event) = 0;
  // Blocks until all work of the queue is over, and needs no memory for that (QueueGuard).
  virtual void drain(Queue queue) noexcept = 0;
  // Whether wait(kUpload or kDownload, event) would block the caller until the event's work is over: on CUDA, when it
  // is the host's (a stream cannot wait for it).
  virtual bool waits_on_host(const Event& event) = 0;

  // For traces: like record(), and the mark remembers when the queue got there. The second waits for both marks, which
  // may be of any two queues.
  virtual Mark mark(Queue queue) = 0;
  virtual double seconds_between(const Mark& begin, const Mark& end) = 0;

  // Makes host memory fit for asynchronous copies.
  virtual void pin(void* data, int64_t num_bytes) = 0;
  // What undoes it, of any thread, when the backend may be gone; empty: nothing is to be done.
  virtual std::function<void(void* data, int64_t num_bytes)> unpinner() const = 0;

  // Whether take_tide_peak costs next to nothing and disturbs nobody (on CUDA it resets PyTorch's peak statistics).
  virtual bool measures_tide_freely() const = 0;
  // Whether memory that the tide leaves can serve as slots and be given back moment by moment. If not (PyTorch's
  // caching allocator would have to free and allocate segments with the driver), payloads get what the highest tide
  // leaves.
  virtual bool follows_tide() const = 0;
  // Device memory taken by everything but slots: now, and the highest since the last call.
  virtual int64_t tide_bytes() = 0;
  virtual int64_t take_tide_peak() = 0;
  // What of the tide was alive at once, without memory that is kept for later allocations: highest since the last call.
  virtual int64_t take_live_tide_peak() = 0;
  // Everything on the device (slots and tide): highest since reset_peak().
  virtual int64_t peak_bytes() = 0;
  virtual void reset_peak() = 0;
  // The least limit under which everything that ran under LimitPolicy::kMeasure would have run: the highest sum of tide
  // and payloads that could not be evicted. 0 where nothing exceeded the limit, and where nothing can.
  virtual int64_t least_limit_bytes() = 0;
  virtual void reset_least_limit() = 0;
  // Payloads of so many bytes in use, beside the tide of now, would have to fit as well.
  virtual void note_needed_payloads(int64_t num_bytes) = 0;

  // Gives back device memory that was freed but is still held by a cache. Slow; for when an allocation fails.
  virtual void reclaim() = 0;
  // What that comes to.
  virtual int64_t reclaimable_bytes() const = 0;

  virtual int64_t limit_bytes() const = 0;
  // Whether LimitPolicy::kMeasure lets anything pass.
  virtual bool may_exceed_limit() const = 0;
  virtual void set_limit_policy(LimitPolicy policy) = 0;
  virtual void set_pressure_handler(PressureHandler* handler) = 0;
};

// Around calls on one queue that use memory whose owner learns of them by an event at the end: where one throws before
// that, what was enqueued is over when this is destroyed.
class QueueGuard {
 public:
  QueueGuard(Backend& backend, Queue queue) : backend_(&backend), queue_(queue) {}
  ~QueueGuard() {
    if (backend_ != nullptr) backend_->drain(queue_);
  }
  QueueGuard(const QueueGuard&) = delete;
  QueueGuard& operator=(const QueueGuard&) = delete;

  // The event, which ends this.
  Event record() {
    Event event = backend_->record(queue_);
    release();
    return event;
  }
  // Another queue's event waits for this one's work.
  void release() { backend_ = nullptr; }

 private:
  Backend* backend_;
  Queue queue_;
};

// `limit_bytes` may be kUnlimited. Throws SystemError when the device cannot be used. On the simulated device
// activations are taken to have left `left_by_tide_bytes` beside the limit ([Note: gradients in the tide],
// memory/tide_memory.h); where it does not follow the tide it is like CUDA.
std::unique_ptr<Backend> make_cpu_backend(int64_t limit_bytes, int64_t left_by_tide_bytes = 0,
                                          bool follows_tide = true);
#ifdef PATRICKSTAR_WITH_CUDA
// PyTorch's allocator may take `rounding_bytes` more than it is told to.
std::unique_ptr<Backend> make_cuda_backend(int device, int64_t limit_bytes, int64_t rounding_bytes);
#endif

// [Note: between two cores] Device memory that no engine owns, for values on their way from an engine's core that ends
// to the next one's; the simulated device does not count it. It may be used on the compute queue, and be freed when
// nothing uses it any more. On CUDA it is made of what slots have left and leaves it to them: as long as there is some,
// a backend that is made keeps what PyTorch has cached, since returning gigabytes to the driver and having them back
// takes seconds. Throws MemoryBudgetError where there is no room.
std::shared_ptr<void> take_cpu_memory(int64_t num_bytes);
#ifdef PATRICKSTAR_WITH_CUDA
std::shared_ptr<void> take_cuda_memory(int device, int64_t num_bytes);
#endif

}  // namespace patrickstar
