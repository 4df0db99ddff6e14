#include "common/thread_pool.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <string>
#include <utility>

#include "common/check.h"

namespace patrickstar {

namespace {

constexpr int64_t kPiecesPerThread = 8;

bool pin(std::thread& thread, int cpu) {
  if (cpu < 0) return false;
  std::vector<cpu_set_t> masks(static_cast<size_t>(cpu) / CPU_SETSIZE + 1);
  const size_t num_bytes = masks.size() * sizeof(cpu_set_t);
  CPU_SET_S(static_cast<size_t>(cpu), num_bytes, masks.data());
  return pthread_setaffinity_np(thread.native_handle(), num_bytes, masks.data()) == 0;
}

}  // namespace

ThreadPool::ThreadPool(int num_threads, const std::vector<int>& worker_cpus) {
  PS_CHECK(num_threads >= 1, ArgumentError, "a thread pool needs at least 1 thread, got ", num_threads);
  for (int i = 1; i < num_threads; ++i) {
    std::thread& worker = workers_.emplace_back([this] { work(); });
    pthread_setname_np(worker.native_handle(), ("ps-worker-" + std::to_string(i)).c_str());
    const auto index = static_cast<size_t>(i - 1);
    if (index < worker_cpus.size() && pin(worker, worker_cpus[index])) pinned_cpus_.push_back(worker_cpus[index]);
  }
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
