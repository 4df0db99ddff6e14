// PyTorch's caching allocator asks for memory before it goes to the driver; this passes the question on.
//
// c10 keeps a registry of "free memory callbacks" per process, so the handler of the running engine stands in one
// process-wide slot here. The callback does not say how much is wanted and runs whenever no cached block fits, so it
// only acts when little is left under the allocator's limit.
#pragma once

#include <cstdint>
#include <optional>

#include "common/pressure_gate.h"

namespace patrickstar {

// How PyTorch's allocator holds memory. A fixed segment goes back to the driver when all of its blocks are free, pages
// of an expandable one as they become free.
enum class Segments : uint8_t { kFixed, kExpandable };

// While it lives, `handler` (not null) is asked when less than `headroom_bytes` of `allowed_bytes`, which PyTorch's
// allocator compares requests with, are left to reserve on `device`. One at a time.
class CudaPressureScope {
 public:
  CudaPressureScope(int device, int64_t allowed_bytes, int64_t headroom_bytes, Segments segments,
                    PressureHandler* handler);
  ~CudaPressureScope();
  CudaPressureScope(const CudaPressureScope&) = delete;
  CudaPressureScope& operator=(const CudaPressureScope&) = delete;

  // The most that fragments of expandable segments took since the scope began ([Note: fragments]); 0 before the
  // allocator had to give memory back.
  int64_t fragment_bytes() const;
};

// The calling thread allocates slots: the handler must not be asked from inside.
class CudaSlotAllocationScope {
 public:
  CudaSlotAllocationScope();
  ~CudaSlotAllocationScope();
};

}  // namespace patrickstar
