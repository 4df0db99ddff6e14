#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <thread>
#include <utility>

#include "backend/backend.h"
#include "backend/device_meter.h"
#include "common/check.h"
#include "common/sizes.h"
#include "common/work_queue.h"

namespace patrickstar {

namespace {

constexpr int64_t kHugePage = int64_t{2} << 20;

struct CpuMark final : MarkState {
  Event reached;
  TraceClock::time_point time;
};

// A worker thread's queue that fails for good, as a CUDA stream does. After a task throws, later tasks are skipped and
// every later event carries the failure. A thread that waits for such an event gets the exception instead of unwritten
// data.
class SimulatedQueue {
 public:
  template <typename Task>
  Event submit(Task task) {
    return queue_.submit([this, task = std::move(task)]() mutable {
      if (failure_) std::rethrow_exception(failure_);
      try {
        task();
      } catch (...) {
        failure_ = std::current_exception();
        throw;
      }
    });
  }

  void drain() { queue_.drain(); }

 private:
  std::exception_ptr failure_;  // used by the worker thread only
  WorkQueue queue_;
};

class CpuBackend final : public Backend {
 public:
  CpuBackend(int64_t limit_bytes, int64_t left_by_activations_bytes, bool follows_activations)
      : left_by_activations_bytes_(left_by_activations_bytes),
        follows_activations_(follows_activations),
        meter_(std::make_shared<DeviceMeter>(limit_bytes)),
        allocator_(std::make_unique<CpuAllocatorMeter>(meter_)) {}

  const char* name() const override { return "cpu"; }
  void shut_down() override { allocator_.reset(); }

  void* allocate(int64_t num_bytes) override {
    if (!meter_->try_add_device_buffer(num_bytes)) return nullptr;
    return allocate_device_buffer(num_bytes);
  }
  void* allocate_over_limit(int64_t num_bytes) override {
    if (meter_->policy_ == LimitPolicy::kEnforce) return nullptr;
    meter_->add_device_buffer_over_limit(num_bytes);
    return allocate_device_buffer(num_bytes);
  }
  void free(void* pointer, int64_t num_bytes, const BusyUntil& busy) noexcept override {
    settle(busy.copied);
    settle(busy.computed);
    std::free(pointer);
    meter_->subtract_device_buffer(num_bytes);
  }

  bool is_idle(const BusyUntil& busy) override { return is_over(busy.copied) && is_over(busy.computed); }

  void* allocate_for_activations(int64_t num_bytes, BusyUntil&) override {
    if (lent_activation_bytes_ + num_bytes > left_by_activations_bytes_) return nullptr;
    void* data = allocate_memory(num_bytes);
    lent_activation_bytes_ += num_bytes;
    return data;
  }
  void free_for_activations(void* pointer, int64_t num_bytes, const BusyUntil& busy) noexcept override {
    settle(busy.copied);
    settle(busy.computed);
    std::free(pointer);
    lent_activation_bytes_ -= num_bytes;
  }
  int64_t lent_activation_bytes() override { return lent_activation_bytes_; }

  void copy(Queue queue, void* to, const void* from, int64_t num_bytes) override {
    run(queue, [=] { std::memcpy(to, from, static_cast<size_t>(num_bytes)); });
  }
  void fill_zero(Queue queue, void* data, int64_t num_bytes) override {
    run(queue, [=] { std::memset(data, 0, static_cast<size_t>(num_bytes)); });
  }

  void enqueue(Queue queue, std::function<void()> task) override { run(queue, std::move(task)); }

  void follow_compute() override {}

  void delay(Queue queue, double seconds) override {
    if (seconds <= 0) return;
    run(queue, [seconds] { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); });
  }

  Event record(Queue queue) override {
    return queue == Queue::kCompute ? nullptr : worker(queue).submit([] {});
  }
  void wait(Queue queue, const Event& event) override {
    if (event == nullptr) return;
    run(queue, [event] { static_cast<HostEvent&>(*event).wait(); });
  }
  void synchronize(const Event& event) override {
    if (event != nullptr) static_cast<HostEvent&>(*event).wait();
  }
  void settle(const Event& event) noexcept override {
    if (event != nullptr) static_cast<HostEvent&>(*event).settle();
  }
  bool is_over(const Event& event) override { return event == nullptr || static_cast<HostEvent&>(*event).is_over(); }
  void drain(Queue queue) noexcept override {
    if (queue != Queue::kCompute) worker(queue).drain();
  }

  bool waits_on_host(const Event&) override { return false; }

  Mark mark(Queue queue) override {
    auto mark = std::make_shared<CpuMark>();
    mark->reached = run(queue, [mark] { mark->time = TraceClock::now(); });
    return mark;
  }
  double seconds_between(const Mark& begin, const Mark& end) override {
    const auto& from = static_cast<const CpuMark&>(*begin);
    const auto& to = static_cast<const CpuMark&>(*end);
    synchronize(from.reached);
    synchronize(to.reached);
    return std::chrono::duration<double>(to.time - from.time).count();
  }

  void pin(void*, int64_t) override {}
  std::function<void(void*, int64_t)> unpinner() const override { return nullptr; }

  void reclaim() override {}
  int64_t reclaimable_bytes() const override { return 0; }

  bool measures_activation_memory_freely() const override { return true; }
  bool follows_activations() const override { return follows_activations_; }
  int64_t activation_bytes() override { return meter_->activation_memory_; }
  int64_t take_activation_peak() override { return meter_->activation_peak_.exchange(meter_->activation_memory_); }
  int64_t take_live_activation_peak() override { return meter_->live_peak_.exchange(meter_->activation_memory_); }
  int64_t peak_bytes() override { return meter_->peak_; }
  void reset_peak() override { meter_->peak_ = meter_->in_use(); }
  int64_t least_limit_bytes() override { return meter_->least_limit_; }
  void reset_least_limit() override { meter_->least_limit_ = 0; }
  void note_needed_chunk_buffers(int64_t num_bytes) override { meter_->note_needed_chunk_buffers(num_bytes); }

  int64_t limit_bytes() const override { return meter_->limit_; }
  bool may_exceed_limit() const override { return meter_->limit_ != kUnlimited; }
  void set_limit_policy(LimitPolicy policy) override { meter_->policy_ = policy; }
  void set_pressure_handler(PressureHandler* handler) override { meter_->pressure_.set(handler); }

 private:
  static void* allocate_memory(int64_t num_bytes) {
    const int64_t alignment = num_bytes >= kHugePage ? kHugePage : 64;
    void* pointer = nullptr;
    const int error = posix_memalign(&pointer, static_cast<size_t>(alignment), static_cast<size_t>(num_bytes));
    PS_CHECK(error == 0, SystemError, "cannot allocate ", show_exactly(num_bytes),
             " for the simulated device: ", std::strerror(error), "; lower device_memory");
    if (alignment == kHugePage) madvise(pointer, static_cast<size_t>(num_bytes), MADV_HUGEPAGE);  // a hint
    return pointer;
  }

  void* allocate_device_buffer(int64_t num_bytes) {
    try {
      return allocate_memory(num_bytes);
    } catch (...) {
      meter_->subtract_device_buffer(num_bytes);
      throw;
    }
  }

  SimulatedQueue& worker(Queue queue) { return workers_[static_cast<size_t>(queue) - 1]; }

  // Runs `task` at once on the compute queue; the event is then null.
  template <typename Task>
  Event run(Queue queue, Task task) {
    if (queue != Queue::kCompute) return worker(queue).submit(std::move(task));
    task();
    return nullptr;
  }

  int64_t left_by_activations_bytes_;
  bool follows_activations_;
  int64_t lent_activation_bytes_ = 0;
  std::shared_ptr<DeviceMeter> meter_;
  std::unique_ptr<CpuAllocatorMeter> allocator_;
  std::array<SimulatedQueue, kNumQueues - 1> workers_;  // of all queues but kCompute
};

}  // namespace

std::unique_ptr<Backend> make_cpu_backend(int64_t limit_bytes, int64_t left_by_activations_bytes,
                                          bool follows_activations) {
  return std::make_unique<CpuBackend>(limit_bytes, left_by_activations_bytes, follows_activations);
}

std::shared_ptr<void> take_cpu_memory(int64_t num_bytes) {
  std::shared_ptr<void> memory(std::malloc(static_cast<size_t>(std::max<int64_t>(num_bytes, 1))), std::free);
  PS_CHECK(memory != nullptr, MemoryBudgetError, "the host has no room for ", show_exactly(num_bytes),
           " of values between two cores; free memory there");
  return memory;
}

}  // namespace patrickstar
