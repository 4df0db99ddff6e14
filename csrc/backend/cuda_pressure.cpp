#include "backend/cuda_pressure.h"

#include <c10/cuda/CUDACachingAllocator.h>

#include <atomic>

namespace patrickstar {

namespace {

struct Listener {
  c10::DeviceIndex device = 0;
  int64_t limit_bytes = 0;
  int64_t headroom_bytes = 0;
  std::atomic<PressureHandler*> handler{nullptr};
};

Listener& listener() {
  static Listener instance;
  return instance;
}

thread_local int slot_allocations = 0;

class EvictChunks final : public c10::FreeMemoryCallback {
 public:
  bool Execute() override {
    Listener& target = listener();
    PressureHandler* handler = target.handler;
    if (handler == nullptr || slot_allocations > 0) return false;
    using c10::CachingDeviceAllocator::StatType;
    const auto stats = c10::cuda::CUDACachingAllocator::getDeviceStats(target.device);
    const auto& reserved = stats.reserved_bytes[static_cast<size_t>(StatType::AGGREGATE)];
    const int64_t left = target.limit_bytes - reserved.current;
    if (left >= target.headroom_bytes) return false;
    handler->release_device_memory(target.headroom_bytes - left);
    return true;
  }
};

}  // namespace

CudaPressureScope::CudaPressureScope(int device, int64_t limit_bytes, int64_t headroom_bytes,
                                     PressureHandler* handler) {
  Listener& target = listener();
  target.device = static_cast<c10::DeviceIndex>(device);
  target.limit_bytes = limit_bytes;
  target.headroom_bytes = headroom_bytes;
  target.handler = handler;
}

CudaPressureScope::~CudaPressureScope() { listener().handler = nullptr; }

CudaSlotAllocationScope::CudaSlotAllocationScope() { ++slot_allocations; }
CudaSlotAllocationScope::~CudaSlotAllocationScope() { --slot_allocations; }

}  // namespace patrickstar

namespace c10 {
using PatrickStarEvictChunks = patrickstar::EvictChunks;
REGISTER_FREE_MEMORY_CALLBACK("patrickstar_evict_chunks", PatrickStarEvictChunks)
}  // namespace c10
