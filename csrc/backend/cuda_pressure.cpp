#include "backend/cuda_pressure.h"

#include <c10/cuda/CUDACachingAllocator.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <type_traits>

namespace patrickstar {

namespace {

struct Listener {
  std::atomic<c10::DeviceIndex> device{0};
  std::atomic<int64_t> limit_bytes{0};
  std::atomic<int64_t> headroom_bytes{0};
  std::atomic<int64_t> largest_request{0};  // of activations since the scope began
  std::atomic<Segments> segments{Segments::kExpandable};
  PressureGate gate;
};

Listener& listener() {
  static Listener instance;
  return instance;
}

thread_local int slot_allocations = 0;

// What PyTorch takes from the driver for a request: 2 MiB for small ones, 20 MiB for medium ones, whole 2 MiB for others.
int64_t segment_bytes(int64_t request) {
  constexpr int64_t kMiB = int64_t{1} << 20;
  if (request <= kMiB) return 2 * kMiB;
  if (request < 10 * kMiB) return 20 * kMiB;
  return (request + 2 * kMiB - 1) / (2 * kMiB) * 2 * kMiB;
}

// The callback below is not told what was asked for, so the largest request so far, also one that failed, is what it
// makes room for: what is large in backward was so in forward, and a forward that failed is run again.
template <typename Entry>
void note_request(const Entry& entry) {
  Listener& target = listener();
  using Action = std::decay_t<Entry>;
  if ((entry.action_ != Action::ALLOC && entry.action_ != Action::OOM) || entry.device_ != target.device) return;
  if (slot_allocations > 0 || !target.gate.is_open()) return;
  const auto size = static_cast<int64_t>(entry.size_);
  int64_t largest = target.largest_request;
  while (size > largest && !target.largest_request.compare_exchange_weak(largest, size)) {
  }
}

class EvictChunks final : public c10::FreeMemoryCallback {
 public:
  bool Execute() override {
    Listener& target = listener();
    if (slot_allocations > 0 || !target.gate.is_open()) return false;
    const int64_t needed = segment_bytes(target.largest_request);
    const int64_t headroom = std::max<int64_t>(target.headroom_bytes, needed);
    int64_t left = left_bytes(target);
    if (left >= headroom) return false;
    int64_t freed = target.gate.ask(headroom - left);
    if (target.segments == Segments::kExpandable) return freed > 0;
    // What was freed may lie in segments that still hold something: it counts when the driver has it back.
    while (freed > 0) {
      c10::cuda::CUDACachingAllocator::emptyCache();
      left = left_bytes(target);
      freed = left < needed ? target.gate.ask(needed - left) : 0;
    }
    return true;
  }

 private:
  static int64_t left_bytes(const Listener& target) {
    using c10::CachingDeviceAllocator::StatType;
    const auto stats = c10::cuda::CUDACachingAllocator::getDeviceStats(target.device);
    return target.limit_bytes - stats.reserved_bytes[static_cast<size_t>(StatType::AGGREGATE)].current;
  }
};

}  // namespace

CudaPressureScope::CudaPressureScope(int device, int64_t limit_bytes, int64_t headroom_bytes, Segments segments,
                                     PressureHandler* handler) {
  static std::once_flag attached;  // PyTorch cannot detach it; without a handler it does nothing
  std::call_once(attached, [] {
    c10::cuda::CUDACachingAllocator::attachAllocatorTraceTracker([](const auto& entry) { note_request(entry); });
  });
  Listener& target = listener();
  target.largest_request = 0;
  target.device = static_cast<c10::DeviceIndex>(device);
  target.limit_bytes = limit_bytes;
  target.headroom_bytes = headroom_bytes;
  target.segments = segments;
  target.gate.set(handler);
}

CudaPressureScope::~CudaPressureScope() { listener().gate.set(nullptr); }

CudaSlotAllocationScope::CudaSlotAllocationScope() { ++slot_allocations; }
CudaSlotAllocationScope::~CudaSlotAllocationScope() { --slot_allocations; }

}  // namespace patrickstar

namespace c10 {
using PatrickStarEvictChunks = patrickstar::EvictChunks;
REGISTER_FREE_MEMORY_CALLBACK("patrickstar_evict_chunks", PatrickStarEvictChunks)
}  // namespace c10
