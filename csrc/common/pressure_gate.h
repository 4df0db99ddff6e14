// The way from whoever lacks device memory to whoever can give some back.
//
// An allocator keeps a gate; the pager stands behind it while an engine is open. Threads may be inside when the engine
// is closed: set() returns when none is inside the handler that was there before, so this may be destroyed then. (A
// thread inside gives up after a moment where it cannot get the runtime's lock, so whoever holds that may call set().)
//
//   gate.set(&pager);
//   gate.ask(num_bytes);   // any thread
//   gate.set(nullptr);
#pragma once

#include <cstdint>
#include <mutex>
#include <shared_mutex>

namespace patrickstar {

// Asked for memory when something else on the device (an activation, a workspace) does not fit.
class PressureHandler {
 public:
  virtual ~PressureHandler() = default;
  // Frees at least `num_bytes` if it can; returns the bytes freed. Called by whichever thread allocates, possibly
  // inside PyTorch's allocator: must not allocate device memory, must not wait for the Python interpreter.
  virtual int64_t release_device_memory(int64_t num_bytes) = 0;
};

class PressureGate {
 public:
  // Null: nobody.
  void set(PressureHandler* handler) {
    const std::lock_guard<std::shared_mutex> lock(mutex_);
    handler_ = handler;
  }
  // The bytes freed; 0 when nobody is there to be asked.
  int64_t ask(int64_t num_bytes) {
    const std::shared_lock<std::shared_mutex> lock(mutex_);
    return handler_ == nullptr ? 0 : handler_->release_device_memory(num_bytes);
  }
  bool is_open() {
    const std::shared_lock<std::shared_mutex> lock(mutex_);
    return handler_ != nullptr;
  }

 private:
  std::shared_mutex mutex_;
  PressureHandler* handler_ = nullptr;
};

}  // namespace patrickstar
