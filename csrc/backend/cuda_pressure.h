// Evicts chunks before PyTorch's caching allocator goes to the driver.
// c10 registers "free memory callbacks" per process, so one process-wide variable holds the running engine's handler.
// The callback runs on every cache miss and does not know the requested size, so it acts only when little is left under
// the allocator's limit.
#pragma once

#include <cstdint>

#include "common/pressure_gate.h"

namespace patrickstar {

// How PyTorch's allocator maps memory. A fixed segment returns to the driver when all its blocks are free; an
// expandable segment returns single pages.
enum class Segments : uint8_t { kFixed, kExpandable };

// Calls `handler` (not null) when less than `headroom_bytes` of `allowed_bytes` are left to reserve on `device`.
// `allowed_bytes` is the limit of PyTorch's allocator. At most one scope exists per process.
class CudaPressureScope {
 public:
  CudaPressureScope(int device, int64_t allowed_bytes, int64_t headroom_bytes, Segments segments,
                    PressureHandler* handler);
  ~CudaPressureScope();
  CudaPressureScope(const CudaPressureScope&) = delete;
  CudaPressureScope& operator=(const CudaPressureScope&) = delete;

  // Forgets the sizes of requests and fragments, after others have used the allocator.
  void restart();
  // Highest bytes of fragments since the scope began or restarted: cached memory on pages that blocks in use share,
  // which serves no large request. Expandable segments only; 0 until the allocator first returned memory to the driver.
  int64_t fragment_bytes() const;
};

// Disables the handler while the calling thread allocates device buffers.
class CudaDeviceBufferAllocationScope {
 public:
  CudaDeviceBufferAllocationScope();
  ~CudaDeviceBufferAllocationScope();
};

}  // namespace patrickstar
