// Groups on CUDA: NCCL, on PyTorch's current stream.
//
// The mean over ranks does not use NCCL's reduction. Shards are exchanged as they are, and one kernel adds them in rank
// order ([Note: order of ranks]). The links carry as many bytes as for a reduce-scatter.
//
// The first message between two ranks connects them, and its enqueuing blocks. The creator of a communicator therefore
// sends a message between all its ranks first.
#include <cuda_runtime_api.h>
#include <nccl.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <deque>
#include <exception>
#include <mutex>
#include <vector>

#include "backend/cuda_device.h"
#include "collective/communicator.h"
#include "collective/cuda_rank_mean.h"
#include "common/check.h"

namespace patrickstar {

namespace {

using Clock = std::chrono::steady_clock;

// Time that abort() leaves another thread to finish enqueuing. NCCL's host code may wait for a dead rank, and only the
// abort ends that wait.
constexpr std::chrono::seconds kEnqueueGrace{1};

void check_cuda(cudaError_t error, const char* call) {
  PS_CHECK(error == cudaSuccess, SystemError, call, " failed: ", cudaGetErrorString(error));
}

// Enqueued and unfinished collectives, oldest first. Any thread.
class PendingCollectives {
 public:
  ~PendingCollectives() {
    for (const Entry& entry : entries_) cudaEventDestroy(entry.finished);
    for (cudaEvent_t event : free_) cudaEventDestroy(event);
  }

  void add(cudaStream_t stream) {
    const std::lock_guard<std::mutex> lock(mutex_);
    drop_finished();
    cudaEvent_t event = nullptr;
    if (free_.empty()) {
      check_cuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
    } else {
      event = free_.back();
      free_.pop_back();
    }
    entries_.push_back({event, Clock::now()});
    check_cuda(cudaEventRecord(event, stream), "cudaEventRecord");
  }

  double oldest_seconds() {
    const std::lock_guard<std::mutex> lock(mutex_);
    drop_finished();
    return entries_.empty() ? 0.0 : std::chrono::duration<double>(Clock::now() - entries_.front().enqueued).count();
  }

 private:
  struct Entry {
    cudaEvent_t finished;
    Clock::time_point enqueued;
  };

  void drop_finished() {
    while (!entries_.empty()) {
      if (cudaEventQuery(entries_.front().finished) == cudaErrorNotReady) {
        cudaGetLastError();  // clear cudaErrorNotReady for the thread's next launch check
        return;
      }
      free_.push_back(entries_.front().finished);
      entries_.pop_front();
    }
  }

  std::mutex mutex_;
  std::deque<Entry> entries_;
  std::vector<cudaEvent_t> free_;
};

class NcclCommunicator final : public Communicator {
 public:
  NcclCommunicator(const ncclUniqueId& id, int rank, int size, int device, const Members& members)
      : device_(device), rank_(rank), size_(size), members_(members) {
    const CudaDeviceGuard guard(device_);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 1;
    const ncclResult_t result = ncclCommInitRankConfig(&comm_, size, id, rank, &config);
    PS_CHECK(result == ncclSuccess, SystemError, "NCCL could not connect ", describe(), ": ",
             ncclGetErrorString(result), " (", ncclGetLastError(nullptr), "); NCCL_DEBUG=INFO says more");
  }

  ~NcclCommunicator() override { close(); }

  int rank() const override { return rank_; }
  int size() const override { return size_; }

  void all_gather(void* whole, int64_t shard_bytes) override {
    if (size_ == 1 || shard_bytes == 0) return;
    enqueue("all_gather", [&](cudaStream_t stream) {
      const char* own = static_cast<char*>(whole) + rank_ * shard_bytes;
      check_call(ncclAllGather(own, whole, static_cast<size_t>(shard_bytes), ncclInt8, comm_, stream), "ncclAllGather");
    });
  }

  void reduce_scatter_mean(void* whole, void* shard, void* scratch, int64_t shard_numel, DType dtype) override {
    const int64_t shard_bytes = shard_numel * element_size(dtype);
    if (shard_bytes == 0) return;
    enqueue("reduce_scatter_mean", [&](cudaStream_t stream) {
      if (size_ == 1) {
        if (shard != whole) copy(whole, shard, shard_bytes, stream);
        return;
      }
      const auto place = [&](void* base, int r) { return static_cast<char*>(base) + r * shard_bytes; };
      swap_shards([&](int r) { return place(whole, r); }, [&](int r) { return place(scratch, r); }, shard_bytes,
                  stream);
      copy(place(whole, rank_), place(scratch, rank_), shard_bytes, stream);
      cuda::mean_of_ranks(scratch, size_, shard, dtype, shard_numel, stream);
    });
  }

  void exchange(const std::vector<PeerBytes>& sends, const std::vector<PeerBytes>& receives) override {
    check_exchange(*this, sends, receives);
    enqueue("exchange", [&](cudaStream_t stream) {
      all_at_once([&] {
        ncclResult_t result = ncclSuccess;
        for (size_t i = 0; i < sends.size() && result == ncclSuccess; ++i) result = send(sends[i], stream);
        for (size_t i = 0; i < receives.size() && result == ncclSuccess; ++i) result = receive(receives[i], stream);
        return result;
      });
    });
  }

  void abort() override {
    if (aborted_.exchange(true)) return;
    const std::unique_lock<std::timed_mutex> lock(mutex_, kEnqueueGrace);
    release();
  }

  // ncclCommDestroy would wait for the other ranks. ncclCommAbort frees the same resources, and no work is left to cut
  // off.
  void close() override { abort(); }

  void check() override {
    const std::unique_lock<std::timed_mutex> lock(mutex_, std::try_to_lock);
    if (lock.owns_lock()) check_unlocked("a collective");  // else the thread that holds the lock checks
  }

  double oldest_pending_seconds() override { return pending_.oldest_seconds(); }

 private:
  void release() {
    try {
      const CudaDeviceGuard guard(device_);
      ncclCommAbort(comm_);
    } catch (const std::exception&) {  // the device has failed
    }
    comm_ = nullptr;
  }

  template <class Calls>
  void enqueue(const char* what, const Calls& calls) {
    const std::lock_guard<std::timed_mutex> lock(mutex_);
    check_unlocked(what);
    const CudaDeviceGuard guard(device_);
    const cudaStream_t stream = current_cuda_stream(device_);
    calls(stream);
    pending_.add(stream);
  }

  // Sends mine(r) to and receives theirs(r) from every other rank, all at once.
  template <class Mine, class Theirs>
  void swap_shards(const Mine& mine, const Theirs& theirs, int64_t num_bytes, cudaStream_t stream) {
    all_at_once([&] {
      ncclResult_t result = ncclSuccess;
      for (int step = 1; step < size_ && result == ncclSuccess; ++step) {
        const int to = (rank_ + step) % size_;
        const int from = (rank_ + size_ - step) % size_;
        result = send({to, mine(to), num_bytes}, stream);
        if (result == ncclSuccess) result = receive({from, theirs(from), num_bytes}, stream);
      }
      return result;
    });
  }

  ncclResult_t send(const PeerBytes& bytes, cudaStream_t stream) {
    if (bytes.num_bytes == 0) return ncclSuccess;
    return ncclSend(bytes.address, static_cast<size_t>(bytes.num_bytes), ncclInt8, bytes.peer, comm_, stream);
  }
  ncclResult_t receive(const PeerBytes& bytes, cudaStream_t stream) {
    if (bytes.num_bytes == 0) return ncclSuccess;
    return ncclRecv(bytes.address, static_cast<size_t>(bytes.num_bytes), ncclInt8, bytes.peer, comm_, stream);
  }

  // Runs `calls` within one NCCL group. `calls` returns its first error.
  template <class Calls>
  void all_at_once(const Calls& calls) {
    check_call(ncclGroupStart(), "ncclGroupStart");
    const ncclResult_t first = calls();
    const ncclResult_t ended =
        ncclGroupEnd();  // also after an error: else later calls of this thread would join the group
    check_call(first, "ncclSend or ncclRecv");
    check_call(ended, "ncclGroupEnd");
  }

  void copy(const void* from, void* to, int64_t num_bytes, cudaStream_t stream) {
    check_cuda(cudaMemcpyAsync(to, from, static_cast<size_t>(num_bytes), cudaMemcpyDeviceToDevice, stream),
               "cudaMemcpyAsync");
  }

  void check_unlocked(const char* what) {
    PS_CHECK(!aborted_, RankFailure, "the group of ", describe(), " was closed or aborted before ", what);
    ncclResult_t result = ncclSuccess;
    check_call(ncclCommGetAsyncError(comm_, &result), "ncclCommGetAsyncError");
    PS_CHECK(result == ncclSuccess || result == ncclInProgress, RankFailure, "a collective of ", describe(),
             " failed: ", ncclGetErrorString(result), " (", ncclGetLastError(comm_), ")");
  }
  void check_call(ncclResult_t result, const char* call) const {
    if (result == ncclSuccess) return;
    const std::string message = detail::join(call, " failed on ", describe(), ": ", ncclGetErrorString(result));
    // These codes mean a broken connection; all others are errors of this rank.
    const bool other = result == ncclRemoteError || result == ncclSystemError || aborted_;
    if (other) throw RankFailure(message);
    throw SystemError(message);
  }
  std::string describe() const {
    return detail::join(describe_member(members_, rank_, size_), " on cuda:", static_cast<int>(device_));
  }

  int device_;
  int rank_;
  int size_;
  Members members_;
  std::atomic<bool> aborted_{false};
  std::timed_mutex mutex_;  // held while enqueuing
  ncclComm_t comm_ = nullptr;
  PendingCollectives pending_;
};

}  // namespace

std::string make_nccl_id() {
  ncclUniqueId id;
  const ncclResult_t result = ncclGetUniqueId(&id);
  PS_CHECK(result == ncclSuccess, SystemError, "ncclGetUniqueId failed: ", ncclGetErrorString(result));
  return {id.internal, sizeof(id.internal)};
}

std::string nccl_version() {
  int version = 0;
  const ncclResult_t result = ncclGetVersion(&version);
  PS_CHECK(result == ncclSuccess, SystemError, "ncclGetVersion failed: ", ncclGetErrorString(result));
  return detail::join(version / 10000, ".", version / 100 % 100, ".", version % 100);
}

std::unique_ptr<Communicator> make_nccl_communicator(const std::string& id, int rank, int size, int device,
                                                     const Members& members) {
  ncclUniqueId unique_id;
  PS_CHECK(id.size() == sizeof(unique_id.internal), ArgumentError, "an NCCL id has ", sizeof(unique_id.internal),
           " bytes, got ", id.size(), "; pass what make_nccl_id() returned");
  PS_CHECK(0 <= rank && rank < size, ArgumentError, "rank is ", rank, " of ", size, ", it must be from 0 to size - 1");
  check_members(members, size);
  std::memcpy(unique_id.internal, id.data(), id.size());
  return std::make_unique<NcclCommunicator>(unique_id, rank, size, device, members);
}

}  // namespace patrickstar
