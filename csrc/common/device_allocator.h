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

  // [Note: gradients in the tide] (memory/tide_memory.h). The same of what activations have left, which goes on to
  // count as tide; null where there is not so much of it. It is ready for the compute queue, for others after `busy`.
  virtual void* allocate_of_tide(int64_t, BusyUntil& /*busy*/) { return nullptr; }
  virtual void free_of_tide(void*, int64_t, const BusyUntil&) noexcept {}
  // What activations cannot have meanwhile: all of it that is in use, and what was taken along for more.
  virtual int64_t lent_tide_bytes() { return 0; }
};

}  // namespace patrickstar
