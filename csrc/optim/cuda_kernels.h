// The optimizer kernels on CUDA, with the bits of kernels.h. Pointers are device pointers; calls enqueue on `stream`
// and return. The caller selects the device. A failed launch throws SystemError.
#pragma once

#include <cuda_runtime_api.h>

#include "optim/kernels.h"
#include "optim/wide_sum.h"

namespace patrickstar::optim::cuda {

void adam(const AdamRange& range, const AdamScalars& scalars, cudaStream_t stream);
void momentum_step(const AdamRange& range, const MomentumScalars& scalars, cudaStream_t stream);
void cast_from_float(const float* in, void* out, DType out_dtype, int64_t numel, cudaStream_t stream);
void cast_to_float(const void* in, DType in_dtype, float* out, int64_t numel, cudaStream_t stream);
void scale(float* values, float factor, int64_t numel, cudaStream_t stream);
void add(void* sum, const void* x, DType dtype, int64_t numel, cudaStream_t stream);
void add_to_float(float* sum, const void* x, DType x_dtype, int64_t numel, cudaStream_t stream);
void sum_squares(const void* x, DType dtype, int64_t numel, double* partials, cudaStream_t stream);
// sums[i] = add_up(partials, ranges[i])
void add_up(const double* partials, const PartialsRange* ranges, int64_t num_ranges, WideSum* sums,
            cudaStream_t stream);
void expand_state(StateType type, const void* data, const float* scales, float* out, int64_t numel,
                  cudaStream_t stream);
void compress_state(const float* in, StateType type, void* out, float* scales, int64_t numel, const RandomKey& key,
                    cudaStream_t stream);

}  // namespace patrickstar::optim::cuda
