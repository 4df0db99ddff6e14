// The group of one rank, for device memory.
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include "collective/communicator.h"
#include "common/check.h"

namespace patrickstar {

namespace {

class CudaSingleCommunicator final : public Communicator {
 public:
  explicit CudaSingleCommunicator(int device) : device_(static_cast<c10::DeviceIndex>(device)) {}

  int rank() const override { return 0; }
  int size() const override { return 1; }
  void all_gather(void*, int64_t) override {}
  void reduce_scatter_mean(void* whole, void* shard, void*, int64_t shard_numel, DType dtype) override {
    if (shard == whole) return;
    const c10::cuda::CUDAGuard guard(device_);
    const auto num_bytes = static_cast<size_t>(shard_numel * element_size(dtype));
    const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(device_).stream();
    const cudaError_t error = cudaMemcpyAsync(shard, whole, num_bytes, cudaMemcpyDeviceToDevice, stream);
    PS_CHECK(error == cudaSuccess, SystemError, "cudaMemcpyAsync failed: ", cudaGetErrorString(error));
  }
  void exchange(const std::vector<PeerBytes>& sends, const std::vector<PeerBytes>& receives) override {
    check_exchange(*this, sends, receives);
  }
  void abort() override {}
  void check() override {}
  double oldest_pending_seconds() override { return 0.0; }
  void close() override {}

 private:
  c10::DeviceIndex device_;
};

}  // namespace

std::unique_ptr<Communicator> make_cuda_single_communicator(int device) {
  return std::make_unique<CudaSingleCommunicator>(device);
}

}  // namespace patrickstar
