#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "quant/compute.h"
#include "quant/cuda_kernels.h"

namespace patrickstar::quant {

namespace {

class CudaCompute final : public Compute {
 public:
  explicit CudaCompute(int device) : device_(static_cast<c10::DeviceIndex>(device)) {}

  void dequantize(const std::vector<DequantizeJob>& jobs) override {
    const c10::cuda::CUDAGuard guard(device_);
    const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(device_).stream();
    for (const DequantizeJob& job : jobs) cuda::dequantize(job.from, job.out, job.dtype, stream);
  }

 private:
  c10::DeviceIndex device_;
};

}  // namespace

std::unique_ptr<Compute> make_cuda_compute(int device) { return std::make_unique<CudaCompute>(device); }

}  // namespace patrickstar::quant
