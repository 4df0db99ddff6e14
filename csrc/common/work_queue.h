// A task queue with one worker thread, for the CPU backend's transfers and the host's optimizer updates.
//
// Any thread may submit. Tasks run in order of submission, and a task that waits for an event blocks the tasks behind
// it, as on a CUDA stream. Tasks with a Need may be reordered among each other. An exception of a task is stored in its
// event (`HostEvent`); later tasks run.
//
//   WorkQueue queue;
//   Event done = queue.submit([] { ... });   // complete when the task is
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

#include "common/event.h"
#include "common/thread_priority.h"

namespace patrickstar {

// The worker takes, among adjacent tasks with a Need, the ready task of lowest rank; if none is ready, the oldest.
// Backward delivers gradients from the last chunk to the first. The next forward needs parameters from the first to the
// last, so updates run in that order as far as gradients are there.
struct Need {
  int64_t rank = 0;                // lower ranks are needed sooner
  std::function<bool()> is_ready;  // true if the task would not wait; the worker calls it until it returns true
};

class WorkQueue {
 public:
  explicit WorkQueue(ThreadPriority priority = ThreadPriority::kUsual);
  ~WorkQueue();  // runs all submitted tasks, then stops
  WorkQueue(const WorkQueue&) = delete;
  WorkQueue& operator=(const WorkQueue&) = delete;

  Event submit(std::function<void()> task, std::optional<Need> need = std::nullopt);
  // Completes when all earlier tasks are over.
  Event record() {
    return submit([] {});
  }
  // Returns when all tasks are over.
  void drain();
  // Number of tasks that are over so far.
  int64_t num_over();
  // Returns when more than `num_seen` tasks are over; false if no task is left.
  bool await_more_over(int64_t num_seen);

 private:
  struct Task {
    std::function<void()> run;
    std::shared_ptr<HostEvent> done;
    std::optional<Need> need;
    bool is_ready = false;
  };

  void work();
  Task take_next();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::condition_variable task_over_;
  std::deque<Task> tasks_;
  bool stopping_ = false;
  bool running_ = false;
  int64_t num_over_ = 0;
  std::thread worker_;
};

}  // namespace patrickstar
