#include "backend/copy_queue.h"

#include <utility>

namespace patrickstar {

void CpuEvent::complete() {
  std::lock_guard<std::mutex> lock(mutex_);
  complete_ = true;
  changed_.notify_all();
}

void CpuEvent::wait() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return complete_; });
}

bool CpuEvent::is_complete() {
  std::lock_guard<std::mutex> lock(mutex_);
  return complete_;
}

CopyQueue::CopyQueue() : worker_([this] { work(); }) {}

CopyQueue::~CopyQueue() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_one();
  worker_.join();
}

void CopyQueue::submit(std::function<void()> task) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    tasks_.push_back(std::move(task));
  }
  changed_.notify_one();
}

Event CopyQueue::record() {
  auto event = std::make_shared<CpuEvent>();
  submit([event] { event->complete(); });
  return event;
}

void CopyQueue::work() {
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
