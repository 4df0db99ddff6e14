// WorkQueue of csrc/common/work_queue.h for the scheduler: its thread runs when its turn comes.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <thread>

#include "common/event.h"
#include "common/thread_priority.h"

namespace patrickstar {

struct Need {
  int64_t rank = 0;
  std::function<bool()> is_ready;
};

class WorkQueue {
 public:
  explicit WorkQueue(ThreadPriority priority = ThreadPriority::kUsual);
  ~WorkQueue();
  WorkQueue(const WorkQueue&) = delete;
  WorkQueue& operator=(const WorkQueue&) = delete;

  Event submit(std::function<void()> task, std::optional<Need> need = std::nullopt);
  Event record() {
    return submit([] {});
  }
  void drain();
  int64_t num_over();
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
  bool is_idle() const { return tasks_.empty() && !running_; }

  std::deque<Task> tasks_;
  bool stopping_ = false;
  bool running_ = false;
  bool left_ = false;
  int64_t num_over_ = 0;
  std::shared_ptr<Scheduler::Thread> turn_;
  std::thread worker_;
};

}  // namespace patrickstar
