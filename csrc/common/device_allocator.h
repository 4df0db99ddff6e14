// Allocates device buffers. The backend implements it; the pool of device buffers uses it.
#pragma once

#include <cstdint>

#include "common/event.h"

namespace patrickstar {

class DeviceAllocator {
 public:
  virtual ~DeviceAllocator() = default;

  // Null if the limit leaves no room. The memory is ready for the compute queue.
  virtual void* allocate(int64_t num_bytes) = 0;
  // May exceed the limit if the backend's policy allows it, as in a warm-up step that measures the least limit. Null
  // otherwise.
  virtual void* allocate_over_limit(int64_t num_bytes) = 0;
  // The memory may be reused once `busy` is over. A failed device keeps it.
  virtual void free(void* pointer, int64_t num_bytes, const BusyUntil& busy) noexcept = 0;
  // True if the next writer of the memory would not have to wait.
  virtual bool is_idle(const BusyUntil& busy) = 0;

  // Gradients in memory that activations have left (memory/activation_memory.h); it still counts as activation memory.
  // Null if too little is left. Ready for the compute queue; other queues wait for `busy`.
  virtual void* allocate_for_activations(int64_t, BusyUntil& /*busy*/) { return nullptr; }
  virtual void free_for_activations(void*, int64_t, const BusyUntil&) noexcept {}
  // Bytes withheld from activations: buffers in use and the unused rest of their regions.
  virtual int64_t lent_activation_bytes() { return 0; }
};

}  // namespace patrickstar
