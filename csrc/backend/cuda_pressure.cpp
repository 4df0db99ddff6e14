#include "backend/cuda_pressure.h"

#include <algorithm>
#include <atomic>

#include "backend/cuda_device.h"

namespace patrickstar {

namespace {

constexpr int64_t kUnknown = -1;

struct Listener {
  std::atomic<int> device{0};
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
void note_fragments(Listener& target, int64_t num_bytes) {
  if (target.segments != Segments::kExpandable || !target.has_released.exchange(false)) return;
  raise_to(target.fragments, std::max<int64_t>(cached_cuda_bytes(target.device) - num_bytes, 0));
}

// The free-memory callback does not get the request's size and makes room for the largest request so far, failed ones
// included. A size of backward appeared in forward, and a failed forward is run again.
void note_request(Listener& target, int64_t num_bytes) {
  if (device_buffer_allocations > 0 || !target.gate.is_open()) return;
  raise_to(target.largest_request, num_bytes);
}

class EvictChunks final : public CudaMemoryListener {
 public:
  void requested(int device, int64_t num_bytes, bool is_granted) override {
    Listener& target = listener();
    if (device != target.device) return;
    note_request(target, num_bytes);
    if (is_granted) note_fragments(target, num_bytes);
  }
  void unmapped(int device) override {
    Listener& target = listener();
    if (device == target.device && target.segments == Segments::kExpandable) target.has_released = true;
  }
  bool free_memory() override {
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
    cuda_api().empty_cache();
    while (left_bytes(target) < needed && target.gate.ask(wanted - left_bytes(target)) > 0) {
      cuda_api().empty_cache();
    }
  }
  static int64_t left_bytes(const Listener& target) {
    return target.allowed_bytes - cuda_api().memory(target.device).reserved;
  }
  // Cached bytes that the allocator returns before it fails. Unknown fragments are assumed to take headroom_bytes.
  static int64_t reclaimable_bytes(const Listener& target) {
    const int64_t cached = cached_cuda_bytes(target.device);
    const int64_t fragments = target.fragments;
    return std::max<int64_t>(cached - (fragments == kUnknown ? int64_t{target.headroom_bytes} : fragments), 0);
  }
};

}  // namespace

CudaPressureScope::CudaPressureScope(int device, int64_t allowed_bytes, int64_t headroom_bytes, Segments segments,
                                     PressureHandler* handler) {
  static EvictChunks evict_chunks;  // without a handler it does nothing
  cuda_api().set_listener(&evict_chunks);
  restart();
  Listener& target = listener();
  target.device = device;
  target.allowed_bytes = allowed_bytes;
  target.headroom_bytes = headroom_bytes;
  target.segments = segments;
  target.gate.set(handler);
}

CudaPressureScope::~CudaPressureScope() { listener().gate.set(nullptr); }

void CudaPressureScope::restart() {
  Listener& target = listener();
  target.largest_request = 0;
  target.fragments = kUnknown;
  target.has_released = false;
}

int64_t CudaPressureScope::fragment_bytes() const { return std::max<int64_t>(listener().fragments, 0); }

CudaDeviceBufferAllocationScope::CudaDeviceBufferAllocationScope() { ++device_buffer_allocations; }
CudaDeviceBufferAllocationScope::~CudaDeviceBufferAllocationScope() { --device_buffer_allocations; }

}  // namespace patrickstar
