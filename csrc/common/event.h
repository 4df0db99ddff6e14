// A point in the work of one queue.
//
// A null Event is complete. Backends derive their own state for the queues of a device; HostEvent is that of a queue of
// host threads (common/work_queue.h). Everybody else passes events around. An event keeps what it needs alive, so
// dropping it is always safe.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>

namespace patrickstar {

struct EventState {
  virtual ~EventState() = default;
};

using Event = std::shared_ptr<EventState>;

// Any thread may call any method.
class HostEvent final : public EventState {
 public:
  void complete() {
    const std::lock_guard<std::mutex> lock(mutex_);
    complete_ = true;
    changed_.notify_all();
  }
  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return complete_; });
  }
  bool is_complete() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return complete_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool complete_ = false;
};

// What must be over before a piece of device memory may be written, or handed on.
struct BusyUntil {
  Event copied;    // the last transfer into or out of it
  Event computed;  // the compute queue's last use of it
};

}  // namespace patrickstar
