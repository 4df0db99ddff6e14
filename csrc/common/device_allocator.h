// Where device slots come from. Implemented by the backend, used by the slot pool.
#pragma once

#include <cstdint>

#include "common/event.h"

namespace patrickstar {

class DeviceAllocator {
 public:
  virtual ~DeviceAllocator() = default;

  // Null when the device has no room within the limit. Memory is ready for the compute queue.
  virtual void* allocate(int64_t num_bytes) = 0;
  // Like allocate, but goes over the limit where the backend's policy allows it (a warm-up step does, to measure the
  // least limit). Null where it does not.
  virtual void* allocate_over_limit(int64_t num_bytes) = 0;
  // The memory may be handed out again once it is not `busy` any more.
  virtual void free(void* pointer, int64_t num_bytes, const BusyUntil& busy) = 0;
  // Whether whoever writes the memory next would not have to wait.
  virtual bool is_idle(const BusyUntil& busy) = 0;
};

// Asked for memory when something else on the device (an activation, a workspace) does not fit.
class PressureHandler {
 public:
  virtual ~PressureHandler() = default;
  // Frees at least `num_bytes` if it can. Called by whichever thread allocates, possibly inside PyTorch's
  // allocator: must not allocate device memory, must not wait for the Python interpreter.
  virtual void release_device_memory(int64_t num_bytes) = 0;
};

}  // namespace patrickstar
