#include "common/thread_pool.h"

#include <sched.h>

#include <algorithm>
#include <fstream>
#include <string>
#include <utility>

#include "common/check.h"

namespace patrickstar {

namespace {

// cgroup v2: "max 100000" or "150000 100000" (quota and period in microseconds).
int cgroup_cpu_limit() {
  std::ifstream file("/sys/fs/cgroup/cpu.max");
  std::string quota;
  double period = 0;
  if (!(file >> quota >> period) || quota == "max" || period <= 0) return 0;
  return static_cast<int>((std::stod(quota) + period - 1) / period);
}

constexpr int64_t kPiecesPerThread = 8;

}  // namespace

int num_available_cpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  int cpus = sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set)
                                                          : static_cast<int>(std::thread::hardware_concurrency());
  const int limit = cgroup_cpu_limit();
  if (limit > 0) cpus = std::min(cpus, limit);
  return std::max(cpus, 1);
}

ThreadPool::ThreadPool(int num_threads) {
  PS_CHECK(num_threads >= 1, ArgumentError, "a thread pool needs at least 1 thread, got ", num_threads);
  for (int i = 1; i < num_threads; ++i) workers_.emplace_back([this] { work(); });
}

ThreadPool::~ThreadPool() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  start_.notify_all();
  for (auto& worker : workers_) worker.join();
}

void ThreadPool::parallel_for(int64_t size, int64_t grain, const std::function<void(int64_t, int64_t)>& fn) {
  if (size <= 0) return;
  grain = std::max<int64_t>(grain, 1);
  if (workers_.empty() || size <= grain) {
    fn(0, size);
    return;
  }
  const std::lock_guard<std::mutex> turn(turn_);
  const int64_t grains = (size + grain - 1) / grain;
  const int64_t pieces = std::min(grains, kPiecesPerThread * num_threads());
  {
    std::lock_guard<std::mutex> lock(mutex_);
    fn_ = &fn;
    size_ = size;
    piece_ = (grains + pieces - 1) / pieces * grain;
    next_ = 0;
    num_running_ = static_cast<int>(workers_.size());
    ++job_;
  }
  start_.notify_all();
  run_pieces();
  std::unique_lock<std::mutex> lock(mutex_);
  finished_.wait(lock, [this] { return num_running_ == 0; });
  fn_ = nullptr;
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

void ThreadPool::work() {
  uint64_t seen = 0;
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    start_.wait(lock, [&] { return stopping_ || job_ != seen; });
    if (stopping_) return;
    seen = job_;
    lock.unlock();
    run_pieces();
    lock.lock();
    if (--num_running_ == 0) finished_.notify_one();
  }
}

void ThreadPool::run_pieces() {
  try {
    for (int64_t begin = next_.fetch_add(piece_); begin < size_; begin = next_.fetch_add(piece_)) {
      (*fn_)(begin, std::min(begin + piece_, size_));
    }
  } catch (...) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!error_) error_ = std::current_exception();
  }
}

}  // namespace patrickstar
