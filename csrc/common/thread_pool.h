// A fixed set of worker threads for loops over index ranges.
//
// Any thread may call `parallel_for`, several at once. The caller works on its own loop, and returns when all pieces
// are done. It never waits for a worker that has taken no piece. Threads take pieces dynamically, so a delayed thread
// does not delay the others. Pieces start at multiples of the grain: elementwise results do not depend on the number of
// threads. A loop allocates nothing, so it cannot stop half-way for lack of memory.
//
// Workers may be pinned to CPUs (common/host_threads.h). If the system refuses a CPU, its worker is not pinned. Callers
// are not pinned and keep their priority.
//
//   ThreadPool pool(4);
//   pool.parallel_for(numel, 1 << 16, [&](int64_t begin, int64_t end) { ... });
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "common/thread_priority.h"

namespace patrickstar {

// Bytes that a thread copies or clears at a time.
constexpr int64_t kCopyGrain = int64_t{4} << 20;

// Workers help urgent loops first, the oldest before the others. They take pieces of a background loop (the first touch
// of host memory, which may take seconds) only while no urgent loop exists. Pieces of a background loop are one grain
// long.
enum class Priority : uint8_t { kUrgent, kBackground };

class ThreadPool {
 public:
  // num_threads includes the calling thread; at least 1. Worker i is pinned to worker_cpus[i]; further workers are not.
  // `priority`: of workers.
  explicit ThreadPool(int num_threads, const std::vector<int>& worker_cpus = {},
                      ThreadPriority priority = ThreadPriority::kUsual);
  // No loop may be running.
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return static_cast<int>(workers_.size()) + 1; }
  // Number of urgent loops that are running.
  int num_urgent() const { return num_urgent_; }
  // CPUs on which workers were pinned successfully.
  const std::vector<int>& pinned_cpus() const { return pinned_cpus_; }

  // Calls fn(begin, end) on disjoint ranges that cover [0, size); each starts at a multiple of `grain`. Returns when
  // all are done. Rethrows the first exception of fn; pieces not yet taken are then skipped.
  template <typename Function>
  void parallel_for(int64_t size, int64_t grain, const Function& fn, Priority priority = Priority::kUrgent) {
    run(size, grain,
        {&fn, [](const void* function, int64_t begin,
                 int64_t end) { (*static_cast<const Function*>(function))(begin, end); }},
        priority);
  }

 private:
  // Refers to the caller's function without owning it.
  struct Body {
    const void* function;
    void (*call)(const void* function, int64_t begin, int64_t end);

    void operator()(int64_t begin, int64_t end) const { call(function, begin, end); }
  };
  struct Loop {
    Body body;
    Priority priority;
    int64_t size;
    int64_t piece;                 // elements per piece
    std::atomic<int64_t> next{0};  // begin of the next piece
    int num_helpers = 0;           // workers inside body; guarded by mutex_, as the following
    std::exception_ptr error = nullptr;
    Loop* younger = nullptr;  // of the same priority
  };
  // Loops of one priority, oldest first.
  struct Loops {
    Loop* oldest = nullptr;

    void add(Loop& loop);
    void remove(Loop& loop);
  };

  void run(int64_t size, int64_t grain, Body body, Priority priority);
  void work();
  // The loop that a worker should help, or null. The caller holds the lock.
  Loop* choose_loop();
  Loops& loops(Priority priority) { return loops_[static_cast<size_t>(priority)]; }
  // False if no piece is left.
  bool run_piece(Loop& loop);
  void keep_error(Loop& loop);

  std::vector<std::thread> workers_;
  std::vector<int> pinned_cpus_;
  std::mutex mutex_;
  std::condition_variable changed_;  // wakes workers: a loop was added, or the pool stops
  std::condition_variable left_;     // wakes callers: a worker has left a loop
  std::array<Loops, 2> loops_;       // by priority: loops that may have pieces left; guarded by mutex_
  std::atomic<int> num_urgent_{0};   // urgent loops among them
  bool stopping_ = false;            // guarded by mutex_
};

}  // namespace patrickstar
