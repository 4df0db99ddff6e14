#include "common/work_queue.h"

#include <exception>
#include <utility>

namespace patrickstar {

WorkQueue::WorkQueue(ThreadPriority)
    : turn_(Scheduler::get().add([this] { return stopping_ || !tasks_.empty(); })), worker_([this] {
        Scheduler::get().become(turn_);
        work();
        left_ = true;
        Scheduler::get().leave();
      }) {}

WorkQueue::~WorkQueue() {
  stopping_ = true;
  Scheduler::get().pass([this] { return left_; });
  worker_.join();
}

Event WorkQueue::submit(std::function<void()> task, std::optional<Need> need) {
  auto done = std::make_shared<HostEvent>();
  tasks_.push_back({std::move(task), done, std::move(need)});
  Scheduler::get().pass();
  return done;
}

void WorkQueue::drain() {
  Scheduler::get().pass([this] { return is_idle(); });
}

int64_t WorkQueue::num_over() {
  Scheduler::get().pass();
  return num_over_;
}

bool WorkQueue::await_more_over(int64_t num_seen) {
  Scheduler::get().pass([this, num_seen] { return num_over_ > num_seen || is_idle(); });
  return num_over_ > num_seen;
}

// An index, not an iterator: while a Need is asked, other threads may submit.
WorkQueue::Task WorkQueue::take_next() {
  size_t next = planted(21) ? tasks_.size() - 1 : 0;
  for (size_t index = 0; index < tasks_.size() && tasks_[index].need && !planted(21); ++index) {
    const bool is_wanted = !tasks_[next].is_ready || tasks_[index].need->rank < tasks_[next].need->rank;
    if (is_wanted && !tasks_[index].is_ready) {
      const auto is_ready = tasks_[index].need->is_ready;
      tasks_[index].is_ready = is_ready();
    }
    if (is_wanted && tasks_[index].is_ready) next = index;
  }
  Task result = std::move(tasks_[next]);
  tasks_.erase(tasks_.begin() + static_cast<std::ptrdiff_t>(next));
  return result;
}

void WorkQueue::work() {
  while (true) {
    Scheduler::get().pass([this] { return stopping_ || !tasks_.empty(); });
    if (tasks_.empty()) return;
    Task task = take_next();
    running_ = true;
    if (planted(22)) {
      task.done->complete();
      Scheduler::get().pass();
    }
    std::exception_ptr failure;
    try {
      task.run();
    } catch (...) {
      failure = std::current_exception();
    }
    task.need.reset();
    task.run = nullptr;
    failure ? task.done->fail(std::move(failure)) : task.done->complete();
    running_ = false;
    ++num_over_;
  }
}

}  // namespace patrickstar
