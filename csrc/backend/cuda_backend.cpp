// The CUDA backend: own streams for copies and collectives, PyTorch's current stream for compute. Device buffers come
// from PyTorch's caching allocator, so its statistics stay true and activations reuse freed buffers.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <exception>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <vector>

#include "backend/backend.h"
#include "backend/cuda_activation_memory.h"
#include "backend/cuda_allocator_limit.h"
#include "backend/cuda_check.h"
#include "backend/cuda_delay.h"
#include "backend/cuda_device.h"
#include "backend/cuda_event_pool.h"
#include "backend/cuda_pressure.h"
#include "common/sizes.h"

namespace patrickstar {

namespace {

// Chunks are evicted on a cache miss when less than this share of the limit is left.
constexpr double kHeadroomRatio = 0.04;
// Bytes of a free block that stay for later activations, at most this share of the limit.
constexpr int64_t kKeptForActivationMemory = int64_t{512} << 20;
constexpr double kKeptForActivationMemoryRatio = 0.02;

int64_t kept_for_activation_memory(int64_t limit_bytes) {
  return std::min(kKeptForActivationMemory,
                  static_cast<int64_t>(static_cast<double>(limit_bytes) * kKeptForActivationMemoryRatio));
}

struct CudaEvent final : EventState {
  explicit CudaEvent(std::shared_ptr<CudaEventPool> event_pool) : pool(std::move(event_pool)), event(pool->take()) {}
  ~CudaEvent() override { pool->give_back(event); }

  std::shared_ptr<CudaEventPool> pool;
  cudaEvent_t event;
};

struct CudaMark final : MarkState {
  explicit CudaMark(std::shared_ptr<CudaEventPool> event_pool) : timed(std::move(event_pool)) {}

  CudaEvent timed;
};

// PyTorch's allocator synchronises with the stream of an allocation when it unmaps an expandable segment, long after
// the engine is closed. Copy streams are therefore created once per device and never destroyed, like PyTorch's own.
// kRoundTripUpdate has the highest priority: its short kernels overtake the rest of a long one.
cudaStream_t lasting_stream(int device, Queue queue) {
  static std::mutex mutex;
  static std::map<std::pair<int, Queue>, cudaStream_t> streams;
  const std::lock_guard<std::mutex> lock(mutex);
  cudaStream_t& stream = streams[{device, queue}];
  if (stream != nullptr) return stream;
  int least = 0;
  int greatest = 0;
  PS_CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
  const int priority = queue == Queue::kRoundTripUpdate ? greatest : least;
  PS_CUDA_CHECK(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, priority));
  return stream;
}

constexpr int kMostDevices = 128;  // as PyTorch

// Bytes held by take_cuda_memory(), by device.
std::atomic<int64_t>& taken_bytes(int device) {
  static std::array<std::atomic<int64_t>, kMostDevices> bytes{};
  return bytes[static_cast<size_t>(device)];
}

HostEvent* host_event(const Event& event) { return dynamic_cast<HostEvent*>(event.get()); }
cudaEvent_t native(const Event& event) { return static_cast<const CudaEvent&>(*event).event; }

class CudaBackend final : public Backend {
 public:
  CudaBackend(int device, int64_t limit_bytes, int64_t rounding_bytes)
      : device_(device),
        events_(std::make_shared<CudaEventPool>(cudaEventDisableTiming)),
        timed_events_(std::make_shared<CudaEventPool>(cudaEventDefault)),
        segments_(rounding_bytes > 0 ? Segments::kExpandable : Segments::kFixed),
        activation_regions_(device, kept_for_activation_memory(limit_bytes)),
        compute_(current_cuda_stream(device_)) {
    const CudaDeviceGuard guard(device_);
    size_t free_bytes = 0;
    size_t total_bytes = 0;
    PS_CUDA_CHECK(cudaMemGetInfo(&free_bytes, &total_bytes));
    total_bytes_ = static_cast<int64_t>(total_bytes);
    limit_bytes_ = std::min(limit_bytes, total_bytes_);
    allowed_bytes_ = limit_bytes_ - rounding_bytes;
    allocator_limit_.emplace(device_, allowed_bytes_, total_bytes_);
    // Memory that PyTorch cached earlier counts towards the limit and can be reclaimed.
    if (taken_bytes(device) > 0) {
      cached_device_buffer_bytes_ = cached_cuda_bytes(device_);
    } else {
      cuda_api().empty_cache();
    }
    reset_peak();
  }
  ~CudaBackend() override {
    for (const std::atomic<cudaStream_t>& stream : streams_) {
      if (stream != nullptr) cudaStreamSynchronize(stream);
    }
  }

  const char* name() const override { return "cuda"; }
  void shut_down() override {
    pressure_.reset();
    allocator_limit_.reset();
  }

  // Device buffers are allocated for the upload stream. PyTorch separates free blocks by stream, so a buffer never
  // splits a cached block that a large activation needs in the next step.
  void* allocate(int64_t num_bytes) override {
    const bool fits = cuda_api().memory(device_).reserved + num_bytes <= allowed_bytes_;
    if (!fits && cached_device_buffer_bytes_ < num_bytes) return nullptr;
    const CudaDeviceGuard guard(device_);
    const CudaDeviceBufferAllocationScope scope;
    void* const pointer = cuda_api().allocate(num_bytes, stream(Queue::kUpload));
    if (pointer == nullptr) {
      cached_device_buffer_bytes_ = 0;
      return nullptr;
    }
    cached_device_buffer_bytes_ = std::max<int64_t>(cached_device_buffer_bytes_ - num_bytes, 0);
    device_buffer_bytes_ += num_bytes;
    // The memory's last user was ordered on the upload stream; the next user may be on any queue.
    wait(Queue::kCompute, record(Queue::kUpload));
    return pointer;
  }
  void* allocate_over_limit(int64_t) override { return nullptr; }
  void free(void* pointer, int64_t num_bytes, const BusyUntil& busy) noexcept override {
    try {
      wait(Queue::kUpload, busy.copied);
      wait(Queue::kUpload, busy.computed);
      wait(Queue::kUpload, record(Queue::kCompute));
      cuda_api().free(pointer);
    } catch (const std::exception&) {  // the device has failed, and its memory with it
    }
    device_buffer_bytes_ -= num_bytes;
    cached_device_buffer_bytes_ += num_bytes;
    least_device_buffer_bytes_ = std::min(least_device_buffer_bytes_, device_buffer_bytes_);
  }

  bool is_idle(const BusyUntil& busy) override { return is_over(busy.copied) && is_over(busy.computed); }

  int64_t lent_activation_bytes() override { return activation_regions_.num_bytes(); }
  void* allocate_for_activations(int64_t num_bytes, BusyUntil& busy) override {
    const CudaDeviceGuard guard(device_);
    void* pointer = activation_regions_.allocate(num_bytes, compute_);
    if (pointer != nullptr) busy = {nullptr, record(Queue::kCompute)};
    return pointer;
  }
  void free_for_activations(void* pointer, int64_t, const BusyUntil& busy) noexcept override {
    try {
      wait(Queue::kCompute, busy.copied);
      activation_regions_.free(pointer);
    } catch (const std::exception&) {  // the device has failed, and its memory with it
    }
  }
  void reclaim() override {
    cuda_api().empty_cache();
    cached_device_buffer_bytes_ = 0;
  }

  void copy(Queue queue, void* to, const void* from, int64_t num_bytes) override {
    const CudaDeviceGuard guard(device_);
    PS_CUDA_CHECK(cudaMemcpyAsync(to, from, static_cast<size_t>(num_bytes), cudaMemcpyDefault, stream(queue)));
  }
  void fill_zero(Queue queue, void* data, int64_t num_bytes) override {
    const CudaDeviceGuard guard(device_);
    PS_CUDA_CHECK(cudaMemsetAsync(data, 0, static_cast<size_t>(num_bytes), stream(queue)));
  }

  void enqueue(Queue queue, std::function<void()> task) override {
    cuda_api().run_on_stream(
        device_, stream(queue), [](void* function) { (*static_cast<std::function<void()>*>(function))(); }, &task);
  }

  void follow_compute() override {
    const cudaStream_t current = current_cuda_stream(device_);
    if (current == compute_) return;
    const Event before = record(Queue::kCompute);
    compute_ = current;
    wait(Queue::kCompute, before);
  }

  void delay(Queue queue, double seconds) override {
    if (seconds <= 0) return;
    const CudaDeviceGuard guard(device_);
    PS_CUDA_CHECK(launch_delay(static_cast<int64_t>(seconds * 1e9), stream(queue)));
  }

  Event record(Queue queue) override {
    const CudaDeviceGuard guard(device_);
    auto event = std::make_shared<CudaEvent>(events_);
    PS_CUDA_CHECK(cudaEventRecord(event->event, stream(queue)));
    return event;
  }
  void wait(Queue queue, const Event& event) override {
    if (event == nullptr) return;
    if (HostEvent* host = host_event(event)) return host->wait();
    const CudaDeviceGuard guard(device_);
    PS_CUDA_CHECK(cudaStreamWaitEvent(stream(queue), native(event), 0));
  }
  void synchronize(const Event& event) override {
    if (event == nullptr) return;
    if (HostEvent* host = host_event(event)) return host->wait();
    const CudaDeviceGuard guard(device_);  // the thread may not have used the device yet
    PS_CUDA_CHECK(cudaEventSynchronize(native(event)));
  }
  void settle(const Event& event) noexcept override {
    if (event == nullptr) return;
    if (HostEvent* host = host_event(event)) return host->settle();
    cudaEventSynchronize(native(event));  // on an error nothing runs on the device any more
  }
  bool is_over(const Event& event) override {
    if (event == nullptr) return true;
    if (HostEvent* host = host_event(event)) return host->is_over();
    const bool is_running = cudaEventQuery(native(event)) == cudaErrorNotReady;
    if (is_running) cudaGetLastError();  // clear cudaErrorNotReady for the thread's next launch check
    return !is_running;
  }
  void drain(Queue queue) noexcept override { cudaStreamSynchronize(stream(queue)); }
  bool waits_on_host(const Event& event) override {
    HostEvent* host = event == nullptr ? nullptr : host_event(event);
    return host != nullptr && !host->is_over();
  }

  Mark mark(Queue queue) override {
    const CudaDeviceGuard guard(device_);
    auto mark = std::make_shared<CudaMark>(timed_events_);
    PS_CUDA_CHECK(cudaEventRecord(mark->timed.event, stream(queue)));
    return mark;
  }
  double seconds_between(const Mark& begin, const Mark& end) override {
    const cudaEvent_t from = static_cast<const CudaMark&>(*begin).timed.event;
    const cudaEvent_t to = static_cast<const CudaMark&>(*end).timed.event;
    PS_CUDA_CHECK(cudaEventSynchronize(from));
    PS_CUDA_CHECK(cudaEventSynchronize(to));
    float milliseconds = 0;
    PS_CUDA_CHECK(cudaEventElapsedTime(&milliseconds, from, to));
    return milliseconds * 1e-3;
  }

  void pin(void* data, int64_t num_bytes) override {
    const CudaDeviceGuard guard(device_);
    const cudaError_t error = cudaHostRegister(data, static_cast<size_t>(num_bytes), cudaHostRegisterPortable);
    if (error != cudaSuccess) cudaGetLastError();  // clear the error for the thread's next launch check
    PS_CHECK(error == cudaSuccess, SystemError, show_exactly(num_bytes),
             " of host memory cannot be locked for transfers (", cudaGetErrorString(error),
             "): the system has no more, or limits locked memory (ulimit -l); lower host_memory");
  }
  std::function<void(void*, int64_t)> unpinner() const override {
    return [device = device_](void* data, int64_t) {
      const CudaDeviceGuard guard(device);                              // the thread may not have used the device yet
      if (cudaHostUnregister(data) != cudaSuccess) cudaGetLastError();  // nothing can be done about it
    };
  }

  bool measures_activation_memory_freely() const override { return false; }
  bool follows_activations() const override { return false; }
  // Memory that PyTorch reserved beside device buffers, including what its blocks waste.
  int64_t activation_bytes() override { return cuda_api().memory(device_).reserved - device_buffer_bytes_; }
  int64_t take_activation_peak() override {
    note_peaks();
    return std::exchange(activation_peak_, 0);
  }
  int64_t take_live_activation_peak() override {
    note_peaks();
    return std::exchange(live_activation_peak_, 0);
  }
  int64_t peak_bytes() override { return std::max(peak_reserved_, cuda_api().memory(device_).peak_reserved); }
  void reset_peak() override {
    note_peaks();
    peak_reserved_ = 0;
  }
  // PyTorch's allocator always enforces the limit, and refused sizes are unknown here.
  int64_t least_limit_bytes() override { return 0; }
  void reset_least_limit() override {}
  void note_needed_chunk_buffers(int64_t) override {}

  int64_t reclaimable_bytes() const override {
    const int64_t fragments = pressure_ ? pressure_->fragment_bytes() : 0;
    return std::max<int64_t>(cached_cuda_bytes(device_) - fragments, 0);
  }

  int64_t limit_bytes() const override { return limit_bytes_; }
  bool may_exceed_limit() const override { return false; }
  void set_limit_policy(LimitPolicy policy) override {
    if (policy == LimitPolicy::kLifted) {
      note_peaks();
      allocator_limit_.reset();
    } else if (!allocator_limit_) {
      cuda_api().reset_peaks(device_);  // those of others
      if (pressure_) pressure_->restart();
      allocator_limit_.emplace(device_, allowed_bytes_, total_bytes_);
    }
  }
  void set_pressure_handler(PressureHandler* handler) override {
    pressure_.reset();
    if (handler == nullptr) return;
    const auto headroom = static_cast<int64_t>(static_cast<double>(limit_bytes_) * kHeadroomRatio);
    pressure_.emplace(device_, allowed_bytes_, headroom, segments_, handler);
  }

 private:
  // Streams are created on first use. CUDA has few hardware queues (CUDA_DEVICE_MAX_CONNECTIONS), and streams that
  // share one wait for each other.
  cudaStream_t stream(Queue queue) const {
    if (queue == Queue::kCompute) return compute_;
    std::atomic<cudaStream_t>& stream = streams_[static_cast<size_t>(queue)];
    if (stream == nullptr) stream = lasting_stream(device_, queue);
    return stream;
  }
  // PyTorch keeps one peak of each kind; this copies and resets it.
  void note_peaks() {
    const CudaMemory memory = cuda_api().memory(device_);
    const int64_t device_buffers = std::exchange(least_device_buffer_bytes_, device_buffer_bytes_);
    peak_reserved_ = std::max(peak_reserved_, memory.peak_reserved);
    activation_peak_ = std::max(activation_peak_, memory.peak_reserved - device_buffers);
    const int64_t lent = activation_regions_.take_least_bytes();
    live_activation_peak_ = std::max(live_activation_peak_, memory.peak_allocated - device_buffers - lent);
    cuda_api().reset_peaks(device_);
  }
  int device_;
  std::shared_ptr<CudaEventPool> events_;
  std::shared_ptr<CudaEventPool> timed_events_;  // separate: an event with timing costs the GPU a timestamp
  Segments segments_;
  CudaActivationRegions activation_regions_;
  int64_t total_bytes_ = 0;
  int64_t limit_bytes_ = 0;
  // Limit of PyTorch's allocator, below limit_bytes_ by the rounding. The allocator then maps whole pages, which may
  // end at limit_bytes_. A request between the two limits fails after the whole cache was given up.
  int64_t allowed_bytes_ = 0;
  mutable std::array<std::atomic<cudaStream_t>, kNumQueues> streams_{};  // by queue, without kCompute
  cudaStream_t compute_;                                                 // see follow_compute()
  int64_t device_buffer_bytes_ = 0;
  int64_t cached_device_buffer_bytes_ = 0;  // estimate of freed buffers that PyTorch caches for the upload stream
  int64_t least_device_buffer_bytes_ = 0;   // since the last note_peaks
  int64_t peak_reserved_ = 0;
  int64_t activation_peak_ = 0;  // since take_activation_peak()
  int64_t live_activation_peak_ = 0;
  std::optional<AllocatorLimit> allocator_limit_;
  std::optional<CudaPressureScope> pressure_;
};

}  // namespace

std::shared_ptr<void> take_cuda_memory(int device, int64_t num_bytes) {
  const CudaDeviceGuard guard(device);
  const cudaStream_t stream = lasting_stream(device, Queue::kUpload);
  const CudaDeviceBufferAllocationScope scope;
  void* const pointer = cuda_api().allocate(num_bytes, stream);
  PS_CHECK(pointer != nullptr, MemoryBudgetError, "cuda:", device, " has no room for ", show_exactly(num_bytes),
           " of values between two cores; give device_memory that leaves it some");
  taken_bytes(device) += num_bytes;
  std::shared_ptr<void> memory(pointer, [device, num_bytes](void* data) {
    taken_bytes(device) -= num_bytes;
    try {
      cuda_api().free(data);
    } catch (const std::exception&) {  // the device has failed, and its memory with it
    }
  });
  // The memory's last user was ordered on the upload stream.
  cudaEvent_t before = nullptr;
  PS_CUDA_CHECK(cudaEventCreateWithFlags(&before, cudaEventDisableTiming));
  PS_CUDA_CHECK(cudaEventRecord(before, stream));
  PS_CUDA_CHECK(cudaStreamWaitEvent(current_cuda_stream(device), before, 0));
  PS_CUDA_CHECK(cudaEventDestroy(before));
  return memory;
}

std::unique_ptr<Backend> make_cuda_backend(int device, int64_t limit_bytes, int64_t rounding_bytes) {
  PS_CHECK(device < cuda_api().num_devices(), ArgumentError, "local_rank ", device, " names a GPU that is not there; ",
           cuda_api().num_devices(), " are visible");
  return std::make_unique<CudaBackend>(device, limit_bytes, rounding_bytes);
}

}  // namespace patrickstar
