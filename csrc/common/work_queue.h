// A queue of tasks with one worker thread.
//
// Any thread may submit. Tasks run in the order of submission, and one that waits for an event blocks the tasks behind
// it, as on a CUDA stream; those that are submitted with a Need run in another order among each other. The CPU
// backend's transfers and the host's optimizer updates run on such queues. A task that throws ends alone: what it has
// thrown is in its event ([Note: failures travel with events], common/event.h).
//
// [Note: the order of need] Of neighbouring tasks that were submitted with a Need, the worker takes the most needed one
// that is ready, and where none is ready the oldest. So updates that begin in backward, whose gradients come from the
// last chunk to the first, are made as the next forward asks for them, from the first to the last, as far as their
// gradients are there.
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

namespace patrickstar {

// [Note: the order of need]
struct Need {
  int64_t rank = 0;                // lower ones are needed sooner
  std::function<bool()> is_ready;  // whether the task would wait for nothing; called by the worker, until it says so
};

class WorkQueue {
 public:
  WorkQueue();
  ~WorkQueue();  // runs what was submitted, then stops
  WorkQueue(const WorkQueue&) = delete;
  WorkQueue& operator=(const WorkQueue&) = delete;

  Event submit(std::function<void()> task, std::optional<Need> need = std::nullopt);
  // Complete when everything submitted so far is over.
  Event record() {
    return submit([] {});
  }
  // Returns when all tasks are over.
  void drain();
  // Of all tasks so far.
  int64_t num_over();
  // Returns when more than `num_seen` tasks are over; false where none is left that could be.
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
