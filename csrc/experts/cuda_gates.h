// Gates of experts, by element and by row: SwiGLU, and the clamped gate of gpt-oss. For .cu files.
//
// A gate reads kCount columns of a row's gate and up projections as binary32, computes its value or replaces both by
// their gradients, and writes these. `column` is a multiple of kCount.
#pragma once

#include "common/cuda_swiglu.h"
#include "experts/cuda_kernels.h"

namespace patrickstar::experts::cuda {

using namespace patrickstar::cuda;

// Adds kCount columns of the bias of a row's expert. `width`: columns of the bias.
template <DType kType, int kCount>
__device__ inline void add_bias(const ExpertBias& bias, int64_t row, int64_t width, int64_t column,
                                float (&x)[kCount]) {
  const int64_t expert = bias.experts[row];
  const int64_t last = bias.num_experts - 1;
  float values[kCount];
  load<kType>(bias.values, (expert < last ? expert : last) * width + column, values);
#pragma unroll
  for (int j = 0; j < kCount; ++j) x[j] = __fadd_rn(x[j], values[j]);
}

// Gate and up side by side. The value has silu(gate) rounded to the stored dtype.
template <DType kType>
struct SwigluGate {
  const void* gate_up;
  int64_t width;

  template <int kCount>
  __device__ void read(int64_t row, int64_t column, float (&gate)[kCount], float (&up)[kCount]) const {
    const int64_t in_gate = 2 * row * width + column;
    load<kType>(gate_up, in_gate, gate);
    load<kType>(gate_up, in_gate + width, up);
  }

  template <int kCount>
  __device__ void write(void* grad_gate_up, int64_t row, int64_t column, const float (&gate)[kCount],
                        const float (&up)[kCount]) const {
    const int64_t in_gate = 2 * row * width + column;
    store<kType>(grad_gate_up, in_gate, gate);
    store<kType>(grad_gate_up, in_gate + width, up);
  }

  __device__ float value(float gate, float up) const { return swiglu<kType>(gate, up); }

  __device__ void differentiate(float grad, float& gate, float& up) const {
    const float of_gate = gradient_of_gate<kType>(gate, up, grad);
    up = gradient_of_up<kType>(gate, grad);
    gate = of_gate;
  }
};

// Columns alternate between gate and up, and each has a bias. NaN passes through a clamp.
template <DType kType>
struct ClampedGate {
  ClampedRows args;

  template <int kCount>
  __device__ void read(int64_t row, int64_t column, float (&gate)[kCount], float (&up)[kCount]) const {
    float pairs[2][kCount];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t in_row = 2 * column + half * kCount;
      load<kType>(args.gate_up, 2 * row * args.width + in_row, pairs[half]);
      add_bias<kType>(args.bias, row, 2 * args.width, in_row, pairs[half]);
    }
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      gate[j] = pairs[2 * j / kCount][2 * j % kCount];
      up[j] = pairs[(2 * j + 1) / kCount][(2 * j + 1) % kCount];
    }
  }

  template <int kCount>
  __device__ void write(void* grad_gate_up, int64_t row, int64_t column, const float (&gate)[kCount],
                        const float (&up)[kCount]) const {
    float pairs[2][kCount];
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      pairs[2 * j / kCount][2 * j % kCount] = gate[j];
      pairs[(2 * j + 1) / kCount][(2 * j + 1) % kCount] = up[j];
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      store<kType>(grad_gate_up, 2 * (row * args.width + column) + half * kCount, pairs[half]);
    }
  }

  __device__ float at_most_limit(float x) const { return x > args.limit ? args.limit : x; }
  __device__ float within_limit(float x) const { return at_most_limit(x < -args.limit ? -args.limit : x); }

  __device__ float value(float gate, float up) const {
    const float clamped = at_most_limit(gate);
    const float glu = __fmul_rn(clamped, logistic(__fmul_rn(clamped, args.alpha)));
    return __fmul_rn(__fadd_rn(within_limit(up), 1.0f), glu);
  }

  // d (x * s(a * x)) / dx = s + x * a * s * (1 - s) with s the logistic function. A clamped value has no gradient.
  __device__ void differentiate(float grad, float& gate, float& up) const {
    const float clamped = at_most_limit(gate);
    const float s = logistic(__fmul_rn(clamped, args.alpha));
    const float curve = __fmul_rn(args.alpha, __fmul_rn(s, __fsub_rn(1.0f, s)));
    const float slope = __fadd_rn(s, __fmul_rn(clamped, curve));
    const float of_glu = __fmul_rn(grad, __fadd_rn(within_limit(up), 1.0f));
    up = up >= -args.limit && up <= args.limit ? __fmul_rn(grad, __fmul_rn(clamped, s)) : 0.0f;
    gate = gate <= args.limit ? __fmul_rn(of_glu, slope) : 0.0f;
  }
};

}  // namespace patrickstar::experts::cuda
