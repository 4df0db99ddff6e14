// A point in the work of one queue, and what became of the work before it.
//
// A null Event is complete. Backends derive their own state for the queues of a device; HostEvent is that of work on
// host threads (common/work_queue.h). Everybody else passes events around. An event keeps what it needs alive, so
// dropping it is always safe.
//
// [Note: failures travel with events] What fails on a thread that nobody sees is kept in the event of that work.
// Whoever waits for the result gets it, on whichever thread; work that would have used the result fails with it instead
// of using what was not written. Whoever only needs the memory back, and not what is in it, settles instead of waiting.
#pragma once

#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <utility>

namespace patrickstar {

struct EventState {
  virtual ~EventState() = default;
};

using Event = std::shared_ptr<EventState>;

// Any thread may call any method.
class HostEvent final : public EventState {
 public:
  void complete() { end(nullptr); }
  void fail(std::exception_ptr failure) { end(std::move(failure)); }
  // Returns when the work is done; throws what it has failed with.
  void wait() {
    settle();
    if (failure_) std::rethrow_exception(failure_);
  }
  // Returns when the work is over, however it ended.
  void settle() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return is_over_; });
  }
  bool is_over() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return is_over_;
  }

 private:
  void end(std::exception_ptr failure) {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_over_ = true;
    failure_ = std::move(failure);
    changed_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_over_ = false;
  std::exception_ptr failure_;  // constant once the work is over
};

// What must be over before a piece of device memory may be written, or handed on.
struct BusyUntil {
  Event copied;    // the last transfer into or out of it
  Event computed;  // the compute queue's last use of it
};

}  // namespace patrickstar
