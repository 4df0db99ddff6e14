#pragma once

#include <c10/cuda/CUDACachingAllocator.h>

#include <cstdint>
#include <exception>

namespace patrickstar {

// Caps the reserved memory of PyTorch's caching allocator on one device. The destructor removes the cap.
class AllocatorLimit {
 public:
  AllocatorLimit(c10::DeviceIndex device, int64_t limit_bytes, int64_t total_bytes) : device_(device) {
    c10::cuda::CUDACachingAllocator::init(c10::cuda::device_count());
    c10::cuda::CUDACachingAllocator::setMemoryFraction(
        static_cast<double>(limit_bytes) / static_cast<double>(total_bytes), device_);
  }
  ~AllocatorLimit() {
    try {
      c10::cuda::CUDACachingAllocator::setMemoryFraction(1.0, device_);
    } catch (const std::exception&) {  // the device has failed
    }
  }
  AllocatorLimit(const AllocatorLimit&) = delete;
  AllocatorLimit& operator=(const AllocatorLimit&) = delete;

 private:
  c10::DeviceIndex device_;
};

}  // namespace patrickstar
