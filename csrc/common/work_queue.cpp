#include "common/work_queue.h"

#include <exception>
#include <utility>

namespace patrickstar {

WorkQueue::WorkQueue() : worker_([this] { work(); }) {}

WorkQueue::~WorkQueue() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_one();
  worker_.join();
}

Event WorkQueue::submit(std::function<void()> task) {
  auto done = std::make_shared<HostEvent>();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    tasks_.push_back({std::move(task), done});
  }
  changed_.notify_one();
  return done;
}

void WorkQueue::work() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return stopping_ || !tasks_.empty(); });
    if (tasks_.empty()) return;
    Task task = std::move(tasks_.front());
    tasks_.pop_front();
    lock.unlock();
    std::exception_ptr failure;
    try {
      task.run();
    } catch (...) {
      failure = std::current_exception();
    }
    task.run = nullptr;  // what it refers to goes before its event says that it is over
    failure ? task.done->fail(std::move(failure)) : task.done->complete();
    lock.lock();
  }
}

}  // namespace patrickstar
