// Connects an allocator that lacks device memory to the handler that can release some.
//
// The allocator owns the gate; the pager is its handler while an engine is open. set() returns when no thread is inside
// the previous handler, which may then be destroyed. A handler gives up soon if it cannot take the runtime's lock, so
// the lock's holder may call set().
//
//   gate.set(&pager);
//   gate.ask(num_bytes);   // any thread
//   gate.set(nullptr);
#pragma once

#include <cstdint>
#include <mutex>
#include <shared_mutex>

namespace patrickstar {

// Called when an activation or workspace does not fit on the device.
class PressureHandler {
 public:
  virtual ~PressureHandler() = default;
  // Tries to free at least `num_bytes`; returns the bytes freed. Called by the allocating thread, possibly inside
  // PyTorch's allocator. Must not allocate device memory or wait for the Python interpreter.
  virtual int64_t release_device_memory(int64_t num_bytes) = 0;
};

class PressureGate {
 public:
  // Null: no handler.
  void set(PressureHandler* handler) {
    const std::lock_guard<std::shared_mutex> lock(mutex_);
    handler_ = handler;
  }
  // Returns the bytes freed; 0 without a handler.
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
