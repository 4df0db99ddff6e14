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
  // The memory may be handed out again once it is not `busy` any more. A device that has failed keeps it.
  virtual void free(void* pointer, int64_t num_bytes, const BusyUntil& busy) noexcept = 0;
  // Whether whoever writes the memory next would not have to wait.
  virtual bool is_idle(const BusyUntil& busy) = 0;
};

}  // namespace patrickstar
