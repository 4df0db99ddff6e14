#pragma once

#include <cstdint>
#include <exception>

#include "torch_api/attached_torch.h"

namespace patrickstar {

// Caps the reserved memory of PyTorch's caching allocator on one device. The destructor removes the cap.
class AllocatorLimit {
 public:
  AllocatorLimit(int device, int64_t limit_bytes, int64_t total_bytes) : device_(device) {
    cuda_api().limit_memory(device_, static_cast<double>(limit_bytes) / static_cast<double>(total_bytes));
  }
  ~AllocatorLimit() {
    try {
      cuda_api().limit_memory(device_, 1.0);
    } catch (const std::exception&) {  // the device has failed
    }
  }
  AllocatorLimit(const AllocatorLimit&) = delete;
  AllocatorLimit& operator=(const AllocatorLimit&) = delete;

 private:
  int device_;
};

}  // namespace patrickstar
