// The CPU backend's upload and download queues: one worker thread each, first in, first out.
//
// Any thread may submit; tasks run in the order of submission. A task that waits for an event blocks the
// tasks behind it, as on a CUDA stream.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

#include "common/event.h"

namespace patrickstar {

class CpuEvent : public EventState {
 public:
  void complete();
  void wait();
  bool is_complete();

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool complete_ = false;
};

class CopyQueue {
 public:
  CopyQueue();
  ~CopyQueue();  // runs what was submitted, then stops
  CopyQueue(const CopyQueue&) = delete;
  CopyQueue& operator=(const CopyQueue&) = delete;

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
