// A queue of tasks with one worker thread, first in, first out.
//
// Any thread may submit; tasks run in the order of submission. A task that waits for an event blocks the tasks behind
// it, as on a CUDA stream. The CPU backend's transfers and the host's optimizer updates run on such queues.
//
//   WorkQueue queue;
//   queue.submit([] { ... });
//   Event done = queue.record();   // complete when the task is
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
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

  void submit(std::function<void()> task);
  Event record();

 private:
  void work();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  bool stopping_ = false;
  std::thread worker_;
};

}  // namespace patrickstar
