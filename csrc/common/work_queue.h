// A queue of tasks with one worker thread, first in, first out.
//
// Any thread may submit; tasks run in the order of submission. A task that waits for an event blocks the tasks behind
// it, as on a CUDA stream. The CPU backend's transfers and the host's optimizer updates run on such queues. A task that
// throws ends alone: what it has thrown is in its event ([Note: failures travel with events], common/event.h).
//
//   WorkQueue queue;
//   Event done = queue.submit([] { ... });   // complete when the task is
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "common/event.h"

namespace patrickstar {

class WorkQueue {
 public:
  WorkQueue();
  ~WorkQueue();  // runs what was submitted, then stops
  WorkQueue(const WorkQueue&) = delete;
  WorkQueue& operator=(const WorkQueue&) = delete;

  Event submit(std::function<void()> task);
  // Complete when everything submitted so far is over.
  Event record() {
    return submit([] {});
  }

 private:
  struct Task {
    std::function<void()> run;
    std::shared_ptr<HostEvent> done;
  };

  void work();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  bool stopping_ = false;
  std::thread worker_;
};

}  // namespace patrickstar
