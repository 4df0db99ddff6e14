// The update of one element on CUDA, by optimizer. Intrinsics with an explicit rounding mode keep the compiler from
// contracting, whatever its flags. NaN as in kernel_body.inl.
#pragma once

#include <cuda_runtime_api.h>

#include "common/cuda_elementwise.h"
#include "optim/kernels.h"

namespace patrickstar::optim::cuda {

using patrickstar::cuda::quiet;

__device__ inline void adam_step(const AdamScalars& s, float g, float& p, float& m, float& v) {
  g = __fmul_rn(g, s.grad_scale);
  g = __fmaf_rn(s.weight_decay, p, g);
  p = __fmul_rn(p, s.decay);
  m = quiet(__fmaf_rn(s.one_minus_beta1, __fsub_rn(g, m), m));
  v = quiet(__fmaf_rn(__fmul_rn(s.one_minus_beta2, g), g, __fmul_rn(s.beta2, v)));
  const float d = __fmaf_rn(__fsqrt_rn(v), s.inv_sqrt_bias_correction2, s.eps);
  p = quiet(__fmaf_rn(-s.step_size, __fdiv_rn(m, d), p));
}

// 0 for zeros. NaN for non-finite values.
__device__ inline float sign_of(float x) {
  return x == 0.0f ? 0.0f : __fadd_rn(copysignf(1.0f, x), __fmul_rn(x, 0.0f));
}
__device__ inline void momentum_step(const MomentumScalars& s, float g, float& p, float& m) {
  g = __fmul_rn(g, s.grad_scale);
  g = __fmaf_rn(s.weight_decay, p, g);
  float update;
  if (s.rule == MomentumRule::kLion) {
    const float distance = __fsub_rn(g, m);
    update = sign_of(__fmaf_rn(s.one_minus_beta1, distance, m));
    m = quiet(__fmaf_rn(s.one_minus_beta2, distance, m));
  } else {
    m = quiet(__fmaf_rn(s.one_minus_dampening, g, __fmul_rn(s.momentum_factor, m)));
    update = s.rule == MomentumRule::kNesterov ? __fmaf_rn(s.momentum_factor, m, g) : m;
  }
  p = quiet(__fmaf_rn(-s.step_size, update, __fmul_rn(p, s.decay)));
}

// The update of one element, by optimizer.
__device__ inline void step(const AdamScalars& s, float g, float& p, float& m, float& v) { adam_step(s, g, p, m, v); }
__device__ inline void step(const MomentumScalars& s, float g, float& p, float& m, float& /*v*/) {
  momentum_step(s, g, p, m);
}

// Adam with states of fewer bytes, or without a master (cuda_blocks.cu).
void adam_by_blocks(const AdamRange& range, const AdamScalars& scalars, cudaStream_t stream);

}  // namespace patrickstar::optim::cuda
