// The group of one rank, for device memory.
#include <cuda_runtime_api.h>

#include "backend/cuda_device.h"
#include "collective/communicator.h"
#include "common/check.h"

namespace patrickstar {

namespace {

class CudaSingleCommunicator final : public Communicator {
 public:
  explicit CudaSingleCommunicator(int device) : device_(device) {}

  int rank() const override { return 0; }
  int size() const override { return 1; }
  void all_gather(void*, int64_t) override {}
  void reduce_scatter_mean(void* whole, void* shard, void*, int64_t shard_numel, DType dtype) override {
    if (shard == whole) return;
    const CudaDeviceGuard guard(device_);
    const auto num_bytes = static_cast<size_t>(shard_numel * element_size(dtype));
    const cudaStream_t stream = current_cuda_stream(device_);
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
  int device_;
};

}  // namespace

std::unique_ptr<Communicator> make_cuda_single_communicator(int device) {
  return std::make_unique<CudaSingleCommunicator>(device);
}

}  // namespace patrickstar
