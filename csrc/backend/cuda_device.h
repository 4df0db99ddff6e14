// PyTorch's current device and stream of a GPU.
#pragma once

#include <cuda_runtime_api.h>

#include "torch_api/attached_torch.h"

namespace patrickstar {

// Makes a device current for the calling thread while it lives. PyTorch does it, since a plain cudaSetDevice() back to
// a device that the process does not use would make a context there.
class CudaDeviceGuard {
 public:
  explicit CudaDeviceGuard(int device) : before_(cuda_api().exchange_device(device)) {}
  ~CudaDeviceGuard() { cuda_api().restore_device(before_); }
  CudaDeviceGuard(const CudaDeviceGuard&) = delete;
  CudaDeviceGuard& operator=(const CudaDeviceGuard&) = delete;

 private:
  int before_;
};

inline cudaStream_t current_cuda_stream(int device) {
  return static_cast<cudaStream_t>(cuda_api().current_stream(device));
}

// Bytes that PyTorch's caching allocator reserved, and that it allocated to no block.
inline int64_t cached_cuda_bytes(int device) {
  const CudaMemory memory = cuda_api().memory(device);
  return memory.reserved - memory.allocated;
}

}  // namespace patrickstar
