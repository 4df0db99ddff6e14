#include "backend/cuda_device.h"
#include "optim/compute.h"
#include "optim/cuda_kernels.h"

namespace patrickstar::optim {

namespace {

class CudaCompute final : public Compute {
 public:
  explicit CudaCompute(int device) : device_(device) {}

  void update(const std::vector<UpdateJob>& jobs) override {
    const CudaDeviceGuard guard(device_);
    for (const UpdateJob& job : jobs) {
      if (const auto* adam = std::get_if<AdamScalars>(&job.scalars)) {
        cuda::adam(job.range, *adam, stream());
      } else if (const auto* matrix = std::get_if<MatrixScalars>(&job.scalars)) {
        update_matrix(*this, job.range, *matrix);
      } else {
        cuda::momentum_step(job.range, std::get<MomentumScalars>(job.scalars), stream());
      }
    }
  }
  void cast_from_float(const float* in, void* out, DType dtype, int64_t numel) override {
    const CudaDeviceGuard guard(device_);
    cuda::cast_from_float(in, out, dtype, numel, stream());
  }
  void cast_to_float(const void* in, DType dtype, float* out, int64_t numel) override {
    const CudaDeviceGuard guard(device_);
    cuda::cast_to_float(in, dtype, out, numel, stream());
  }
  void scale(float* values, float factor, int64_t numel) override {
    const CudaDeviceGuard guard(device_);
    cuda::scale(values, factor, numel, stream());
  }
  void add(void* sum, const void* x, DType dtype, int64_t numel) override {
    const CudaDeviceGuard guard(device_);
    cuda::add(sum, x, dtype, numel, stream());
  }
  void add_to_float(float* sum, const void* x, DType dtype, int64_t numel) override {
    const CudaDeviceGuard guard(device_);
    cuda::add_to_float(sum, x, dtype, numel, stream());
  }
  void sum_squares(const void* x, DType dtype, int64_t numel, double* partials) override {
    const CudaDeviceGuard guard(device_);
    cuda::sum_squares(x, dtype, numel, partials, stream());
  }
  void add_up(const double* partials, const PartialsRange* ranges, int64_t num_ranges, WideSum* sums) override {
    const CudaDeviceGuard guard(device_);
    cuda::add_up(partials, ranges, num_ranges, sums, stream());
  }
  void expand_state(StateType type, const void* data, const float* scales, float* out, int64_t numel) override {
    const CudaDeviceGuard guard(device_);
    cuda::expand_state(type, data, scales, out, numel, stream());
  }
  void compress_state(const float* in, StateType type, void* out, float* scales, int64_t numel,
                      const RandomKey& key) override {
    const CudaDeviceGuard guard(device_);
    cuda::compress_state(in, type, out, scales, numel, key, stream());
  }

 private:
  cudaStream_t stream() const { return current_cuda_stream(device_); }

  int device_;
};

}  // namespace

std::unique_ptr<Compute> make_cuda_compute(int device) { return std::make_unique<CudaCompute>(device); }

}  // namespace patrickstar::optim
