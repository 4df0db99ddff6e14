// Streams and the caching allocator of the PyTorch that this file is compiled against.
#include "torch_shim/parts.h"

#ifdef PATRICKSTAR_WITH_CUDA

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <type_traits>

namespace patrickstar {

namespace {

namespace allocator = c10::cuda::CUDACachingAllocator;

constexpr auto kAggregate = static_cast<size_t>(c10::CachingDeviceAllocator::StatType::AGGREGATE);

c10::DeviceIndex index(int device) { return static_cast<c10::DeviceIndex>(device); }

std::atomic<CudaMemoryListener*> listener{nullptr};

template <typename Entry>
void tell(const Entry& entry) {
  using Action = std::decay_t<Entry>;
  CudaMemoryListener* const target = listener;
  if (entry.action_ == Action::SEGMENT_UNMAP) target->unmapped(entry.device_);
  if (entry.action_ != Action::ALLOC && entry.action_ != Action::OOM) return;
  target->requested(entry.device_, static_cast<int64_t>(entry.size_), entry.action_ == Action::ALLOC);
}

class FreeMemory final : public c10::FreeMemoryCallback {
 public:
  bool Execute() override {
    CudaMemoryListener* const target = listener;
    return target != nullptr && target->free_memory();
  }
};

class Cuda final : public CudaApi {
 public:
  int num_devices() const override { return c10::cuda::device_count(); }
  int exchange_device(int device) const override { return c10::cuda::ExchangeDevice(index(device)); }
  void restore_device(int device) const noexcept override {
    C10_CUDA_CHECK_WARN(c10::cuda::MaybeSetDevice(index(device)));
  }
  void* current_stream(int device) const override { return c10::cuda::getCurrentCUDAStream(index(device)).stream(); }
  void run_on_stream(int device, void* stream, void (*task)(void*), void* context) const override {
    const c10::cuda::CUDAStreamGuard guard(
        c10::cuda::getStreamFromExternal(static_cast<cudaStream_t>(stream), index(device)));
    task(context);
  }

  void* allocate(int64_t num_bytes, void* stream) const override {
    try {
      return allocator::raw_alloc_with_stream(static_cast<size_t>(num_bytes), static_cast<cudaStream_t>(stream));
    } catch (const c10::OutOfMemoryError&) {
      return nullptr;
    }
  }
  void free(void* data) const override { allocator::raw_delete(data); }
  void empty_cache() const override { allocator::emptyCache(); }
  void limit_memory(int device, double fraction) const override {
    allocator::init(c10::cuda::device_count());
    allocator::setMemoryFraction(fraction, index(device));
  }
  CudaMemory memory(int device) const override {
    const auto stats = allocator::getDeviceStats(index(device));
    const auto& reserved = stats.reserved_bytes[kAggregate];
    const auto& allocated = stats.allocated_bytes[kAggregate];
    return {reserved.current, reserved.peak, allocated.current, allocated.peak};
  }
  void reset_peaks(int device) const override { allocator::resetPeakStats(index(device)); }
  CudaBlocks blocks(int device, void* stream) const override {
    CudaBlocks found;
    for (const auto& segment : allocator::snapshot().segments) {
      if (segment.device != index(device) || segment.stream != stream || !segment.is_large) continue;
      found.reserved += static_cast<int64_t>(segment.total_size);
      for (const auto& block : segment.blocks) {
        if (block.allocated || block.active) continue;
        found.largest_free = std::max(found.largest_free, static_cast<int64_t>(block.size));
      }
    }
    return found;
  }
  void set_listener(CudaMemoryListener* target) const override {
    listener = target;
    static std::once_flag attached;  // PyTorch cannot detach a tracker
    std::call_once(attached, [] { allocator::attachAllocatorTraceTracker([](const auto& entry) { tell(entry); }); });
  }
};

}  // namespace

const CudaApi* shim::cuda_api() {
  static const auto* api = new Cuda;
  return api;
}

}  // namespace patrickstar

namespace c10 {
using PatrickStarFreeMemory = patrickstar::FreeMemory;
REGISTER_FREE_MEMORY_CALLBACK("patrickstar_free_memory", PatrickStarFreeMemory)
}  // namespace c10

#else

const patrickstar::CudaApi* patrickstar::shim::cuda_api() { return nullptr; }

#endif
