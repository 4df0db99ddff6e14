// SwiGLU by element, silu(gate) * up with silu(gate) rounded to the stored dtype, and its gradient. For .cu files.
#pragma once

#include "common/cuda_elementwise.h"

namespace patrickstar::cuda {

template <DType kType>
__device__ inline float rounded(float x) {
  return to_float<kType>(from_float<kType>(x));
}

__device__ inline float logistic(float x) { return __fdiv_rn(1.0f, __fadd_rn(1.0f, expf(-x))); }

__device__ inline float silu(float x) { return __fdiv_rn(x, __fadd_rn(1.0f, expf(-x))); }

template <DType kType>
__device__ inline float swiglu(float gate, float up) {
  return __fmul_rn(rounded<kType>(silu(gate)), up);
}

// d silu(x) / dx = s * (1 + x * (1 - s)) with s the logistic function of x.
template <DType kType>
__device__ inline float gradient_of_gate(float gate, float up, float grad) {
  const float s = logistic(gate);
  const float slope = __fmul_rn(s, __fadd_rn(1.0f, __fmul_rn(gate, __fsub_rn(1.0f, s))));
  return __fmul_rn(rounded<kType>(__fmul_rn(grad, up)), slope);
}

template <DType kType>
__device__ inline float gradient_of_up(float gate, float grad) {
  return __fmul_rn(grad, rounded<kType>(silu(gate)));
}

}  // namespace patrickstar::cuda
