#include "common/thread_pool.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <string>

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

ThreadPool::ThreadPool(int num_threads, const std::vector<int>& worker_cpus, ThreadPriority priority) {
  PS_CHECK(num_threads >= 1, ArgumentError, "a thread pool needs at least 1 thread, got ", num_threads);
  for (int i = 1; i < num_threads; ++i) {
    std::thread& worker = workers_.emplace_back([this, priority] {
      take_priority(priority);
      work();
    });
    pthread_setname_np(worker.native_handle(), ("ps-worker-" + std::to_string(i)).c_str());
    const auto index = static_cast<size_t>(i - 1);
    if (index < worker_cpus.size() && pin(worker, worker_cpus[index])) pinned_cpus_.push_back(worker_cpus[index]);
  }
}

ThreadPool::~ThreadPool() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::Loops::add(Loop& loop) {
  Loop** end = &oldest;
  while (*end != nullptr) end = &(*end)->younger;
  *end = &loop;
}

void ThreadPool::Loops::remove(Loop& loop) {
  Loop** place = &oldest;
  while (*place != &loop) place = &(*place)->younger;
  *place = loop.younger;
}

void ThreadPool::run(int64_t size, int64_t grain, Body body, Priority priority) {
  if (size <= 0) return;
  grain = std::max<int64_t>(grain, 1);
  if (workers_.empty() || size <= grain) return body(0, size);
  const int64_t grains = (size + grain - 1) / grain;
  const bool is_urgent = priority == Priority::kUrgent;
  const int64_t pieces = is_urgent ? std::min(grains, kPiecesPerThread * num_threads()) : grains;
  Loop loop{body, priority, size, (grains + pieces - 1) / pieces * grain};
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    loops(priority).add(loop);
    num_urgent_ += is_urgent ? 1 : 0;
  }
  changed_.notify_all();
  while (run_piece(loop)) {
  }
  std::unique_lock<std::mutex> lock(mutex_);
  loops(priority).remove(loop);
  num_urgent_ -= is_urgent ? 1 : 0;
  left_.wait(lock, [&loop] { return loop.num_helpers == 0; });
  if (loop.error) std::rethrow_exception(loop.error);
}

ThreadPool::Loop* ThreadPool::choose_loop() {
  for (const Loops& loops : loops_) {
    for (Loop* loop = loops.oldest; loop != nullptr; loop = loop->younger) {
      if (loop->next < loop->size) return loop;
    }
  }
  return nullptr;
}

void ThreadPool::work() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    Loop* loop = nullptr;
    changed_.wait(lock, [&] { return stopping_ || (loop = choose_loop()) != nullptr; });
    if (stopping_) return;
    ++loop->num_helpers;
    lock.unlock();
    while (run_piece(*loop) && (loop->priority == Priority::kUrgent || num_urgent_ == 0)) {
    }
    lock.lock();
    if (--loop->num_helpers == 0) left_.notify_all();
  }
}

bool ThreadPool::run_piece(Loop& loop) {
  const int64_t begin = loop.next.fetch_add(loop.piece);
  if (begin >= loop.size) return false;
  try {
    loop.body(begin, std::min(begin + loop.piece, loop.size));
  } catch (...) {
    keep_error(loop);
  }
  return true;
}

void ThreadPool::keep_error(Loop& loop) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!loop.error) loop.error = std::current_exception();
  loop.next = loop.size;  // skip the pieces that are left
}

}  // namespace patrickstar
