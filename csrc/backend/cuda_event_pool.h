// A pool of CUDA events: creating an event costs microseconds and takes a driver lock. Any thread.
#pragma once

#include <cuda_runtime_api.h>

#include <mutex>
#include <vector>

#include "backend/cuda_check.h"

namespace patrickstar {

// `flags` are those of cudaEventCreateWithFlags.
class CudaEventPool {
 public:
  explicit CudaEventPool(unsigned int flags) : flags_(flags) {}
  CudaEventPool(const CudaEventPool&) = delete;
  CudaEventPool& operator=(const CudaEventPool&) = delete;
  ~CudaEventPool() {
    for (cudaEvent_t event : free_) cudaEventDestroy(event);
  }
  cudaEvent_t take() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (free_.empty()) {
      cudaEvent_t event = nullptr;
      PS_CUDA_CHECK(cudaEventCreateWithFlags(&event, flags_));
      return event;
    }
    cudaEvent_t event = free_.back();
    free_.pop_back();
    return event;
  }
  void give_back(cudaEvent_t event) {
    const std::lock_guard<std::mutex> lock(mutex_);
    free_.push_back(event);
  }

 private:
  unsigned int flags_;
  std::mutex mutex_;
  std::vector<cudaEvent_t> free_;
};

}  // namespace patrickstar
