#include "backend/cuda_pressure.h"

#include <c10/cuda/CUDACachingAllocator.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <type_traits>

#include "backend/cuda_stats.h"

namespace patrickstar {

namespace {

constexpr int64_t kUnknown = -1;

struct Listener {
  std::atomic<c10::DeviceIndex> device{0};
  std::atomic<int64_t> allowed_bytes{0};
  std::atomic<int64_t> headroom_bytes{0};
  std::atomic<int64_t> largest_request{0};   // largest activation request since the scope began
  std::atomic<int64_t> fragments{kUnknown};  // highest bytes since the scope began
  std::atomic<bool> has_released{false};     // pages were unmapped and nothing was allocated since
  std::atomic<Segments> segments{Segments::kExpandable};
  PressureGate gate;
};

Listener& listener() {
  static Listener instance;
  return instance;
}

thread_local int device_buffer_allocations = 0;

void raise_to(std::atomic<int64_t>& most, int64_t value) {
  int64_t before = most;
  while (value > before && !most.compare_exchange_weak(before, value)) {
  }
}

// Bytes that PyTorch reserves for a request: 2 MiB for small ones, 20 MiB for medium ones, else the size rounded up to
// 2 MiB.
int64_t segment_bytes(int64_t request) {
  constexpr int64_t kMiB = int64_t{1} << 20;
  if (request <= kMiB) return 2 * kMiB;
  if (request < 10 * kMiB) return 20 * kMiB;
  return (request + 2 * kMiB - 1) / (2 * kMiB) * 2 * kMiB;
}

// Before an allocation fails, PyTorch returns every expandable page without a block to the driver. Memory still cached
// afterwards shares pages with blocks: fragments. They are measured at the first allocation after the release; PyTorch
// does not yet count its bytes as allocated.
template <typename Entry>
void note_fragments(const Entry& entry) {
  Listener& target = listener();
  using Action = std::decay_t<Entry>;
  if (entry.device_ != target.device || target.segments != Segments::kExpandable) return;
  if (entry.action_ == Action::SEGMENT_UNMAP) target.has_released = true;
  if (entry.action_ != Action::ALLOC) return;
  if (!target.has_released.exchange(false)) return;
  const int64_t cached = cuda_bytes(target.device).cached;
  const int64_t now = std::max<int64_t>(cached - static_cast<int64_t>(entry.size_), 0);
  raise_to(target.fragments, now);
}

// The free-memory callback does not get the request's size and makes room for the largest request so far, failed ones
// included. A size of backward appeared in forward, and a failed forward is run again.
template <typename Entry>
void note_request(const Entry& entry) {
  Listener& target = listener();
  using Action = std::decay_t<Entry>;
  if ((entry.action_ != Action::ALLOC && entry.action_ != Action::OOM) || entry.device_ != target.device) return;
  if (device_buffer_allocations > 0 || !target.gate.is_open()) return;
  const auto size = static_cast<int64_t>(entry.size_);
  raise_to(target.largest_request, size);
}

class EvictChunks final : public c10::FreeMemoryCallback {
 public:
  bool Execute() override {
    Listener& target = listener();
    if (device_buffer_allocations > 0 || !target.gate.is_open()) return false;
    const int64_t needed = segment_bytes(target.largest_request);
    const int64_t headroom = std::max<int64_t>(target.headroom_bytes, needed);
    const int64_t left = left_bytes(target);
    if (left >= headroom) return false;
    if (target.segments == Segments::kExpandable) {
      const int64_t missing = headroom - left - reclaimable_bytes(target);
      // The largest request fails now unless PyTorch returns its cache, which it would do next without another
      // callback.
      const bool is_close = left < needed && missing > -target.headroom_bytes / 4;
      if (!is_close) return missing > 0 && target.gate.ask(missing) > 0;
      make_room(target, needed, headroom);
      return true;
    }
    // Freed memory may lie in segments that still hold blocks.
    if (target.gate.ask(headroom - left) > 0) make_room(target, needed, needed);
    return true;
  }

 private:
  // Freed memory counts after emptyCache(). Requests `wanted` while less than `needed` is left.
  static void make_room(Listener& target, int64_t needed, int64_t wanted) {
    c10::cuda::CUDACachingAllocator::emptyCache();
    while (left_bytes(target) < needed && target.gate.ask(wanted - left_bytes(target)) > 0) {
      c10::cuda::CUDACachingAllocator::emptyCache();
    }
  }
  static int64_t left_bytes(const Listener& target) {
    return target.allowed_bytes - cuda_bytes(target.device).reserved;
  }
  // Cached bytes that the allocator returns before it fails. Unknown fragments are assumed to take headroom_bytes.
  static int64_t reclaimable_bytes(const Listener& target) {
    const int64_t cached = cuda_bytes(target.device).cached;
    const int64_t fragments = target.fragments;
    return std::max<int64_t>(cached - (fragments == kUnknown ? int64_t{target.headroom_bytes} : fragments), 0);
  }
};

}  // namespace

CudaPressureScope::CudaPressureScope(int device, int64_t allowed_bytes, int64_t headroom_bytes, Segments segments,
                                     PressureHandler* handler) {
  static std::once_flag attached;  // PyTorch cannot detach a tracker; without a handler it does nothing
  std::call_once(attached, [] {
    c10::cuda::CUDACachingAllocator::attachAllocatorTraceTracker([](const auto& entry) {
      note_request(entry);
      note_fragments(entry);
    });
  });
  Listener& target = listener();
  target.largest_request = 0;
  target.fragments = kUnknown;
  target.has_released = false;
  target.device = static_cast<c10::DeviceIndex>(device);
  target.allowed_bytes = allowed_bytes;
  target.headroom_bytes = headroom_bytes;
  target.segments = segments;
  target.gate.set(handler);
}

CudaPressureScope::~CudaPressureScope() { listener().gate.set(nullptr); }

int64_t CudaPressureScope::fragment_bytes() const { return std::max<int64_t>(listener().fragments, 0); }

CudaDeviceBufferAllocationScope::CudaDeviceBufferAllocationScope() { ++device_buffer_allocations; }
CudaDeviceBufferAllocationScope::~CudaDeviceBufferAllocationScope() { --device_buffer_allocations; }

}  // namespace patrickstar

namespace c10 {
using PatrickStarEvictChunks = patrickstar::EvictChunks;
REGISTER_FREE_MEMORY_CALLBACK("patrickstar_evict_chunks", PatrickStarEvictChunks)
}  // namespace c10
