#include "common/work_queue.h"

#include <utility>

namespace patrickstar {

WorkQueue::WorkQueue() : worker_([this] { work(); }) {}

WorkQueue::~WorkQueue() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_one();
  worker_.join();
}

void WorkQueue::submit(std::function<void()> task) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    tasks_.push_back(std::move(task));
  }
  changed_.notify_one();
}

Event WorkQueue::record() {
  auto event = std::make_shared<HostEvent>();
  submit([event] { event->complete(); });
  return event;
}

void WorkQueue::work() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return stopping_ || !tasks_.empty(); });
    if (tasks_.empty()) return;
    std::function<void()> task = std::move(tasks_.front());
    tasks_.pop_front();
    lock.unlock();
    task();
    task = nullptr;
    lock.lock();
  }
}

}  // namespace patrickstar
