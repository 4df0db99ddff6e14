#pragma once

#include <c10/cuda/CUDACachingAllocator.h>

#include <cstddef>
#include <cstdint>

namespace patrickstar {

inline constexpr auto kAggregate = static_cast<size_t>(c10::CachingDeviceAllocator::StatType::AGGREGATE);

struct CudaBytes {
  int64_t reserved;
  int64_t cached;  // reserved, and allocated to no block
};

inline CudaBytes cuda_bytes(c10::DeviceIndex device) {
  const auto stats = c10::cuda::CUDACachingAllocator::getDeviceStats(device);
  const int64_t reserved = stats.reserved_bytes[kAggregate].current;
  return {reserved, reserved - stats.allocated_bytes[kAggregate].current};
}

}  // namespace patrickstar
