#include "common/work_queue.h"

#include <exception>
#include <utility>

namespace patrickstar {

WorkQueue::WorkQueue(ThreadPriority priority)
    : worker_([this, priority] {
        take_priority(priority);
        work();
      }) {}

WorkQueue::~WorkQueue() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_one();
  worker_.join();
}

Event WorkQueue::submit(std::function<void()> task, std::optional<Need> need) {
  auto done = std::make_shared<HostEvent>();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    tasks_.push_back({std::move(task), done, std::move(need)});
  }
  changed_.notify_one();
  return done;
}

void WorkQueue::drain() {
  std::unique_lock<std::mutex> lock(mutex_);
  task_over_.wait(lock, [this] { return tasks_.empty() && !running_; });
}

int64_t WorkQueue::num_over() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return num_over_;
}

bool WorkQueue::await_more_over(int64_t num_seen) {
  std::unique_lock<std::mutex> lock(mutex_);
  task_over_.wait(lock, [&] { return num_over_ > num_seen || (tasks_.empty() && !running_); });
  return num_over_ > num_seen;
}

WorkQueue::Task WorkQueue::take_next() {
  auto next = tasks_.begin();
  for (auto task = tasks_.begin(); task != tasks_.end() && task->need; ++task) {
    const bool is_wanted = !next->is_ready || task->need->rank < next->need->rank;
    if (is_wanted && !task->is_ready) task->is_ready = task->need->is_ready();
    if (is_wanted && task->is_ready) next = task;
  }
  Task result = std::move(*next);
  tasks_.erase(next);
  return result;
}

void WorkQueue::work() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return stopping_ || !tasks_.empty(); });
    if (tasks_.empty()) return;
    Task task = take_next();
    running_ = true;
    lock.unlock();
    std::exception_ptr failure;
    try {
      task.run();
    } catch (...) {
      failure = std::current_exception();
    }
    task.need.reset();
    task.run = nullptr;  // release captured objects before the event completes
    failure ? task.done->fail(std::move(failure)) : task.done->complete();
    lock.lock();
    running_ = false;
    ++num_over_;
    task_over_.notify_all();
  }
}

}  // namespace patrickstar
