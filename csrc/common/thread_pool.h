// A fixed set of worker threads that split one range of indices at a time.
//
// The pool belongs to whoever made it (the runtime). `parallel_for` may be called by any thread; callers take turns. The
// caller works too, so a pool of n threads starts n - 1. Threads take pieces of the range as they get to them, so one
// that the system delays does not delay the others; pieces start at multiples of the grain, so results of elementwise
// work do not depend on the number of threads.
//
// Workers may be pinned, each to a CPU (common/host_threads.h chooses them); callers are left where they are. A CPU that
// the system refuses leaves its worker free.
//
//   ThreadPool pool(4);
//   pool.parallel_for(numel, 1 << 16, [&](int64_t begin, int64_t end) { ... });
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace patrickstar {

class ThreadPool {
 public:
  // num_threads counts the calling thread; at least 1. Worker i is pinned to worker_cpus[i]; those beyond are free.
  explicit ThreadPool(int num_threads, const std::vector<int>& worker_cpus = {});
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return static_cast<int>(workers_.size()) + 1; }
  // Where workers are pinned indeed.
  const std::vector<int>& pinned_cpus() const { return pinned_cpus_; }

  // Calls fn(begin, end) on disjoint ranges that cover [0, size); each range starts at a multiple of
  // `grain`. Returns when all are done; rethrows the first exception.
  void parallel_for(int64_t size, int64_t grain, const std::function<void(int64_t, int64_t)>& fn);

 private:
  void work();
  void run_pieces();

  std::vector<std::thread> workers_;
  std::vector<int> pinned_cpus_;
  std::mutex turn_;  // held by the caller whose job runs
  std::mutex mutex_;
  std::condition_variable start_;
  std::condition_variable finished_;
  const std::function<void(int64_t, int64_t)>* fn_ = nullptr;  // guarded by mutex_, constant during a job
  int64_t size_ = 0;
  int64_t piece_ = 1;             // elements that a thread takes at a time
  std::atomic<int64_t> next_{0};  // where the next piece starts
  uint64_t job_ = 0;
  int num_running_ = 0;
  bool stopping_ = false;
  std::exception_ptr error_;
};

}  // namespace patrickstar
