#include "backend/cuda_device.h"
#include "quant/compute.h"
#include "quant/cuda_kernels.h"

namespace patrickstar::quant {

namespace {

class CudaCompute final : public Compute {
 public:
  explicit CudaCompute(int device) : device_(device) {}

  void dequantize(const std::vector<DequantizeJob>& jobs) override {
    const CudaDeviceGuard guard(device_);
    const cudaStream_t stream = current_cuda_stream(device_);
    for (const DequantizeJob& job : jobs) cuda::dequantize(job.from, job.out, job.dtype, stream);
  }

 private:
  int device_;
};

}  // namespace

std::unique_ptr<Compute> make_cuda_compute(int device) { return std::make_unique<CudaCompute>(device); }

}  // namespace patrickstar::quant
