// A fixed set of worker threads that share the work of loops over ranges of indices.
//
// The pool belongs to whoever made it (the runtime). `parallel_for` may be called by any thread, by several at once.
// Each caller works on its own loop until no piece of it is left, and returns when the pieces that workers have taken
// are done: it waits for no worker that is busy elsewhere, or that the system has not woken yet. Threads take pieces of
// a range as they get to them, so one that the system delays does not delay the others; pieces start at multiples of
// the grain, so results of elementwise work do not depend on the number of threads.
//
// [Note: urgent loops first] Workers help urgent loops, the oldest first. They take pieces of a background loop (the
// first touch of host memory, which may take seconds) only while there is no urgent one, and return to look for one
// after each piece, which is of one grain.
//
// A loop allocates nothing, so that what has begun is not left half done where memory has run out.
//
// Workers may be pinned, each to a CPU (common/host_threads.h chooses them); callers are left where they are. A CPU
// that the system refuses leaves its worker free.
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

namespace patrickstar {

// Bytes that a thread copies or clears at a time.
constexpr int64_t kCopyGrain = int64_t{4} << 20;

// [Note: urgent loops first]
enum class Priority : uint8_t { kUrgent, kBackground };

class ThreadPool {
 public:
  // num_threads counts the calling thread; at least 1. Worker i is pinned to worker_cpus[i]; those beyond are free.
  explicit ThreadPool(int num_threads, const std::vector<int>& worker_cpus = {});
  // No loop may be running.
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return static_cast<int>(workers_.size()) + 1; }
  // Urgent loops that run now.
  int num_urgent() const { return num_urgent_; }
  // Where workers are pinned indeed.
  const std::vector<int>& pinned_cpus() const { return pinned_cpus_; }

  // Calls fn(begin, end) on disjoint ranges that cover [0, size); each range starts at a multiple of `grain`. Returns
  // when all are done. What fn throws first is rethrown, and pieces that nobody has taken by then are left out.
  template <typename Function>
  void parallel_for(int64_t size, int64_t grain, const Function& fn, Priority priority = Priority::kUrgent) {
    run(size, grain,
        {&fn, [](const void* function, int64_t begin,
                 int64_t end) { (*static_cast<const Function*>(function))(begin, end); }},
        priority);
  }

 private:
  // A caller's function, which it keeps.
  struct Body {
    const void* function;
    void (*call)(const void* function, int64_t begin, int64_t end);

    void operator()(int64_t begin, int64_t end) const { call(function, begin, end); }
  };
  struct Loop {
    Body body;
    Priority priority;
    int64_t size;
    int64_t piece;                 // elements that a thread takes at a time
    std::atomic<int64_t> next{0};  // where the next piece starts
    int num_helpers = 0;           // workers that may be in body; guarded by mutex_, as the following
    std::exception_ptr error = nullptr;
    Loop* younger = nullptr;  // of the same priority
  };
  // Loops of one priority, the oldest first.
  struct Loops {
    Loop* oldest = nullptr;

    void add(Loop& loop);
    void remove(Loop& loop);
  };

  void run(int64_t size, int64_t grain, Body body, Priority priority);
  void work();
  // The loop that a worker should help, or null. The lock is held.
  Loop* choose_loop();
  Loops& loops(Priority priority) { return loops_[static_cast<size_t>(priority)]; }
  // False when no piece is left.
  bool run_piece(Loop& loop);
  void keep_error(Loop& loop);

  std::vector<std::thread> workers_;
  std::vector<int> pinned_cpus_;
  std::mutex mutex_;
  std::condition_variable changed_;  // for workers: a loop was added, or the pool stops
  std::condition_variable left_;     // for callers: a worker has left a loop
  std::array<Loops, 2> loops_;       // by priority: those that may have pieces left; guarded by mutex_
  std::atomic<int> num_urgent_{0};   // of these
  bool stopping_ = false;            // guarded by mutex_
};

}  // namespace patrickstar
