// An event marks a point in the work of one queue and carries the failure of the work before it.
//
// A null Event is complete. Backends derive their own state for device queues; HostEvent serves work on host threads
// (common/work_queue.h). An event keeps its resources alive, so dropping it is always safe.
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

// An exception of a worker thread is stored in the event of its task. wait() rethrows it on the waiting thread, so
// dependent work fails instead of reading unwritten data. settle() ignores it, for callers that only need the memory
// back. Any thread may call any method.
class HostEvent final : public EventState, public std::enable_shared_from_this<HostEvent> {
 public:
  void complete() { end(nullptr); }
  void fail(std::exception_ptr failure) { end(std::move(failure)); }
  // Returns when the work is done. Throws its failure.
  void wait() {
    settle();
    if (failure_) std::rethrow_exception(failure_);
  }
  // Returns when the work has ended or failed.
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

// Work that must end before device memory may be written or handed on.
struct BusyUntil {
  Event copied;    // the last transfer into or out of it
  Event computed;  // the compute queue's last use of it
};

}  // namespace patrickstar
