// Groups on CUDA whose ranks share GPUs, which NCCL refuses. Data goes through host memory and a CPU group, so results
// have the CPU group's bits.
//
//   current stream    device to host | event | waits for the gate's number ........ | host to device
//   worker            waits for the event | the CPU group's collective | opens the gate
//
// The enqueuing thread never blocks, so ranks may enqueue the collectives of two groups in different orders. Meant for
// trying several ranks on few GPUs: the copies and messages of a group run one after the other.
//
// Deadlock rule: CUDA may map several streams to one hardware queue, where later work waits behind the gate. All work
// that opens a gate is therefore enqueued before the gate's wait. Copies run on the caller's stream and the worker
// enqueues nothing.
//
// Limitation: the first launch of a kernel loads it, which waits for all streams, gates included. The launching thread
// then stands still until the gate opens. If ranks enqueue collectives of several groups in different orders, it stands
// still for ever. Run each kernel once before, or set CUDA_MODULE_LOADING=EAGER.
//
// Failure: a failed collective leaves its gate closed until abort(), as NCCL's streams do. No later kernel computes
// with missing data before the watching thread has informed all ranks.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <atomic>
#include <chrono>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

#include "backend/cuda_check.h"
#include "backend/cuda_device.h"
#include "backend/cuda_event_pool.h"
#include "collective/communicator.h"
#include "common/check.h"
#include "common/process_fork.h"
#include "common/sizes.h"
#include "common/work_queue.h"

namespace patrickstar {

namespace {

using Clock = std::chrono::steady_clock;

// A growing number in host memory that streams wait for. Any thread may call open().
class Gate {
 public:
  Gate() : wait_value_(find_wait_value()) {
    void* memory = nullptr;
    PS_CUDA_CHECK(cudaHostAlloc(&memory, sizeof(std::atomic<uint32_t>), cudaHostAllocMapped));
    number_ = new (memory) std::atomic<uint32_t>(0);
    void* address = nullptr;
    PS_CUDA_CHECK(cudaHostGetDevicePointer(&address, memory, 0));
    address_ = reinterpret_cast<CUdeviceptr>(address);
  }
  ~Gate() { cudaFreeHost(number_); }
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;

  // Later work of `stream` runs once open() was called with `number` or one of the next 2^31 numbers.
  void enqueue_wait(cudaStream_t stream, uint32_t number) {
    const CUresult result = wait_value_(stream, address_, number, CU_STREAM_WAIT_VALUE_GEQ);
    PS_CHECK(result == CUDA_SUCCESS, SystemError, "cuStreamWaitValue32 failed with CUDA's error ",
             static_cast<int>(result), ", but ranks that share a GPU need it; ", kRemedy);
  }
  void open(uint32_t number) {
    uint32_t now = number_->load();
    while (static_cast<int32_t>(number - now) > 0 && !number_->compare_exchange_weak(now, number)) {
    }
  }

 private:
  using WaitValue = decltype(&cuStreamWaitValue32);
  static constexpr const char* kRemedy = "install a newer driver, or give each rank a GPU of its own";
  static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t) && std::atomic<uint32_t>::is_always_lock_free,
                "the device reads it as it is");

  // Looked up through the runtime: build machines need not have the driver library.
  static WaitValue find_wait_value() {
    constexpr const char* kName = "cuStreamWaitValue32";
    void* function = nullptr;
#if CUDART_VERSION >= 12050
    const cudaError_t error = cudaGetDriverEntryPointByVersion(kName, &function, 12000, cudaEnableDefault);
#else
    const cudaError_t error = cudaGetDriverEntryPoint(kName, &function, cudaEnableDefault);
#endif
    PS_CHECK(error == cudaSuccess && function != nullptr, SystemError, "CUDA's driver has no ", kName,
             ", but ranks that share a GPU need it; ", kRemedy);
    return reinterpret_cast<WaitValue>(function);
  }

  WaitValue wait_value_;
  std::atomic<uint32_t>* number_ = nullptr;
  CUdeviceptr address_ = 0;
};

// Page-locked host memory that grows. Outgrown blocks stay until clear(): freeing one would wait for the device, and
// possibly for another rank.
class StagingMemory {
 public:
  ~StagingMemory() { clear(); }

  char* at_least(int64_t num_bytes) {
    if (num_bytes > num_bytes_) {
      void* block = nullptr;
      const cudaError_t error = cudaHostAlloc(&block, static_cast<size_t>(num_bytes), cudaHostAllocDefault);
      if (error != cudaSuccess) cudaGetLastError();  // clear the error for the thread's next launch check
      PS_CHECK(error == cudaSuccess, SystemError, show_exactly(num_bytes),
               " of host memory, through which ranks that share a GPU send what they exchange, cannot be locked for "
               "transfers (",
               cudaGetErrorString(error), "); lower host_memory or default_chunk_size");
      blocks_.push_back(block);
      num_bytes_ = num_bytes;
    }
    return static_cast<char*>(blocks_.back());
  }
  void clear() {
    for (void* block : blocks_) cudaFreeHost(block);
    blocks_.clear();
    num_bytes_ = 0;
  }

 private:
  std::vector<void*> blocks_;
  int64_t num_bytes_ = 0;
};

constexpr unsigned int kEventFlags =
    cudaEventDisableTiming | cudaEventBlockingSync;  // blocking waits: ranks share the cores

class CudaStagedCommunicator final : public Communicator {
 public:
  CudaStagedCommunicator(std::unique_ptr<Communicator> host, int device, const Members& members)
      : device_(device), host_(std::move(host)), members_(members) {
    const CudaDeviceGuard guard(device_);
    gate_ = std::make_unique<Gate>();
    copied_back_ = events_.take();
    worker_ = std::make_unique<WorkQueue>();
  }

  ~CudaStagedCommunicator() override {
    if (!made_in_.is_here()) {
      worker_.release();  // the thread exists only in the parent process
      return;
    }
    close();
    events_.give_back(copied_back_);
  }

  int rank() const override { return host_->rank(); }
  int size() const override { return host_->size(); }

  void all_gather(void* whole, int64_t shard_bytes) override {
    if (shard_bytes == 0) return;
    auto* const device = static_cast<char*>(whole);
    const int64_t begin = rank() * shard_bytes;
    const int64_t end = begin + shard_bytes;
    const int64_t whole_bytes = size() * shard_bytes;
    enqueue(
        "all_gather", whole_bytes,
        [&](char* staged, cudaStream_t stream) { copy(staged + begin, device + begin, shard_bytes, stream); },
        [this, shard_bytes](char* staged) { host_->all_gather(staged, shard_bytes); },
        [&](char* staged, cudaStream_t stream) {
          copy(device, staged, begin, stream);
          copy(device + end, staged + end, whole_bytes - end, stream);
        });
  }

  void reduce_scatter_mean(void* whole, void* shard, void* /*scratch*/, int64_t shard_numel, DType dtype) override {
    const int64_t shard_bytes = shard_numel * element_size(dtype);
    if (shard_bytes == 0) return;
    const int64_t whole_bytes = size() * shard_bytes;
    enqueue(
        "reduce_scatter_mean", whole_bytes,
        [&](char* staged, cudaStream_t stream) { copy(staged, whole, whole_bytes, stream); },
        [this, whole_bytes, shard_numel, dtype](char* staged) {
          host_->reduce_scatter_mean(staged, staged, scratch(whole_bytes), shard_numel, dtype);
        },
        [&](char* staged, cudaStream_t stream) { copy(shard, staged, shard_bytes, stream); });
  }

  void exchange(const std::vector<PeerBytes>& sends, const std::vector<PeerBytes>& receives) override {
    check_exchange(*this, sends, receives);
    int64_t num_bytes = 1;  // a rank without messages takes part as well
    const Places sent = places(sends, num_bytes);
    const Places received = places(receives, num_bytes);
    enqueue(
        "exchange", num_bytes,
        [&](char* staged, cudaStream_t stream) {
          for (size_t i = 0; i < sends.size(); ++i)
            copy(staged + sent[i], sends[i].address, sends[i].num_bytes, stream);
        },
        [this, sends, receives, sent, received](char* staged) {
          host_->exchange(at_places(sends, sent, staged), at_places(receives, received, staged));
        },
        [&](char* staged, cudaStream_t stream) {
          for (size_t i = 0; i < receives.size(); ++i)
            copy(receives[i].address, staged + received[i], receives[i].num_bytes, stream);
        });
  }

  // Takes no lock and waits for no thread: the enqueuing thread may itself wait for the device.
  void abort() override {
    aborted_ = true;
    host_->abort();
    gate_->open(num_enqueued_);
  }

  void close() override {
    abort();
    const std::lock_guard<std::mutex> lock(enqueue_mutex_);
    if (worker_ == nullptr) return;
    worker_.reset();  // tasks that are left do nothing
    host_->close();
    scratch_.reset();
    try {
      const CudaDeviceGuard guard(device_);
      cudaEventSynchronize(copied_back_);
      staging_.clear();
    } catch (const std::exception&) {  // the device has failed
    }
  }

  void check() override {
    const std::lock_guard<std::mutex> lock(state_mutex_);
    if (failure_ != nullptr) std::rethrow_exception(failure_);
    PS_CHECK(!aborted_, RankFailure, describe(), " was closed or aborted");
  }

  double oldest_pending_seconds() override {
    const std::lock_guard<std::mutex> lock(state_mutex_);
    return pending_.empty() ? 0.0 : std::chrono::duration<double>(Clock::now() - pending_.front()).count();
  }

 private:
  using HostCollective = std::function<void(char*)>;
  using Places = std::vector<int64_t>;
  static constexpr int64_t kAlignment = 64;

  // On the current stream: `down` fills `num_bytes` of staging memory, `collective` runs on them, `up` copies them
  // back.
  template <class Down, class Up>
  void enqueue(const char* what, int64_t num_bytes, const Down& down, HostCollective collective, const Up& up) {
    const std::lock_guard<std::mutex> lock(enqueue_mutex_);
    PS_CHECK(worker_ != nullptr, StateError, describe(), " is closed, and ", what, " was called");
    check();
    const CudaDeviceGuard guard(device_);
    const cudaStream_t stream = current_cuda_stream(device_);
    char* const staged = staging_.at_least(num_bytes);
    // The previous collective, perhaps on another stream, uses the staging memory until then.
    PS_CUDA_CHECK(cudaStreamWaitEvent(stream, copied_back_, 0));
    down(staged, stream);
    const cudaEvent_t copied = events_.take();
    PS_CUDA_CHECK(cudaEventRecord(copied, stream));
    const uint32_t number = ++num_enqueued_;
    gate_->enqueue_wait(stream, number);
    up(staged, stream);
    PS_CUDA_CHECK(cudaEventRecord(copied_back_, stream));
    {
      const std::lock_guard<std::mutex> state_lock(state_mutex_);
      pending_.push_back(Clock::now());
    }
    worker_->submit([this, number, copied, staged, run = std::move(collective)] { work(number, copied, staged, run); });
  }

  // Runs on the worker's thread.
  void work(uint32_t number, cudaEvent_t copied, char* staged, const HostCollective& collective) {
    std::exception_ptr failure;
    try {
      const CudaDeviceGuard guard(device_);
      PS_CUDA_CHECK(cudaEventSynchronize(copied));
      if (!aborted_) collective(staged);
    } catch (...) {
      failure = std::current_exception();
    }
    events_.give_back(copied);
    {
      const std::lock_guard<std::mutex> lock(state_mutex_);
      pending_.pop_front();
      if (failure_ == nullptr) failure_ = failure;
    }
    if (failure == nullptr || aborted_) gate_->open(number);  // else it stays closed until abort()
  }

  // Offsets of messages in the staging memory, aligned, from `end` on. Moves `end` behind the last one.
  static Places places(const std::vector<PeerBytes>& messages, int64_t& end) {
    Places places;
    for (const PeerBytes& message : messages) {
      end = (end + kAlignment - 1) / kAlignment * kAlignment;
      places.push_back(end);
      end += message.num_bytes;
    }
    return places;
  }
  static std::vector<PeerBytes> at_places(std::vector<PeerBytes> messages, const Places& places, char* staged) {
    for (size_t i = 0; i < messages.size(); ++i) messages[i].address = staged + places[i];
    return messages;
  }

  // Used by the worker's thread only.
  char* scratch(int64_t num_bytes) {
    if (num_bytes > scratch_bytes_) {
      scratch_.reset(new char[static_cast<size_t>(num_bytes)]);
      scratch_bytes_ = num_bytes;
    }
    return scratch_.get();
  }

  void copy(void* to, const void* from, int64_t num_bytes, cudaStream_t stream) {
    if (num_bytes == 0) return;
    PS_CUDA_CHECK(cudaMemcpyAsync(to, from, static_cast<size_t>(num_bytes), cudaMemcpyDefault, stream));
  }

  std::string describe() const {
    return detail::join("the group of ", describe_member(members_, rank(), size()),
                        " on cuda:", static_cast<int>(device_));
  }

  const ProcessFork made_in_ = ProcessFork::current();
  int device_;
  std::unique_ptr<Communicator> host_;
  Members members_;
  std::unique_ptr<Gate> gate_;
  CudaEventPool events_{kEventFlags};
  std::atomic<bool> aborted_{false};
  std::atomic<uint32_t> num_enqueued_{0};

  std::mutex enqueue_mutex_;  // guards the next three
  StagingMemory staging_;
  cudaEvent_t copied_back_ = nullptr;  // recorded behind the last collective
  std::unique_ptr<WorkQueue> worker_;  // null: closed

  std::unique_ptr<char[]> scratch_;  // for the mean on the host
  int64_t scratch_bytes_ = 0;

  std::mutex state_mutex_;  // guards the rest
  std::deque<Clock::time_point> pending_;
  std::exception_ptr failure_;  // the worker's first failure
};

}  // namespace

std::unique_ptr<Communicator> make_cuda_staged_communicator(std::unique_ptr<Communicator> host, int device,
                                                            const Members& members) {
  return std::make_unique<CudaStagedCommunicator>(std::move(host), device, members);
}

}  // namespace patrickstar
