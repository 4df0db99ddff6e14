// HostEvent of csrc/common/event.h for the scheduler: whoever waits gives its turn away.
#pragma once

#include <exception>
#include <memory>
#include <utility>

#include "common/scheduler.h"

namespace patrickstar {

struct EventState {
  virtual ~EventState() = default;
};

using Event = std::shared_ptr<EventState>;

class HostEvent final : public EventState, public std::enable_shared_from_this<HostEvent> {
 public:
  void complete() { end(nullptr); }
  void fail(std::exception_ptr failure) { end(std::move(failure)); }
  void wait() {
    settle();
    if (failure_) std::rethrow_exception(failure_);
  }
  void settle() {
    Scheduler::get().pass([this] { return is_over_; });
  }
  bool is_over() {
    Scheduler::get().pass();
    return is_over_;
  }

 private:
  void end(std::exception_ptr failure) {
    is_over_ = true;
    failure_ = std::move(failure);
  }

  bool is_over_ = false;
  std::exception_ptr failure_;
};

// Work that must end before device memory may be written or handed on.
struct BusyUntil {
  Event copied;
  Event computed;
};

}  // namespace patrickstar
