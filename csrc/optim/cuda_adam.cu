// Adam with float32 moments on CUDA, and float32 or split masters. Torch-free.
#include "common/cuda_elementwise.h"
#include "optim/cuda_kernels.h"
#include "optim/cuda_steps.h"

namespace patrickstar::optim::cuda {

namespace {

using namespace patrickstar::cuda;

// A thread loads all its elements before it stores any, so `param` may be `grad`.
template <DType kGrad, DType kParam, StateType kMaster>
struct AdamBody {
  AdamRange r;
  AdamScalars s;

  template <int kCount>
  __device__ void run(int64_t i) const {
    float g[kCount], p[kCount], m[kCount], v[kCount];
    load<kGrad>(r.grad, i, g);
    load<DType::kFloat32>(r.momentum, i, m);
    load<DType::kFloat32>(r.variance, i, v);
    load_master(i, p, v);
#pragma unroll
    for (int k = 0; k < kCount; ++k) adam_step(s, g[k], p[k], m[k], v[k]);
    const bool apart = r.new_master != nullptr;
    store_master(apart ? r.new_master : r.master, i, p, v);
    store<DType::kFloat32>(apart ? r.new_momentum : r.momentum, i, m);
    store<DType::kFloat32>(apart ? r.new_variance : r.variance, i, v);
    if (r.param != nullptr) store<kParam>(r.param, i, p);
  }

  // [Note: split masters]
  template <int kCount>
  __device__ void load_master(int64_t i, float (&p)[kCount], float (&v)[kCount]) const {
    if constexpr (kMaster == StateType::kFloat32) {
      load<DType::kFloat32>(r.master, i, p);
    } else {
      using Halves = Pack<uint16_t, kCount>;
      const auto upper = *reinterpret_cast<const Halves*>(static_cast<const uint16_t*>(r.param) + i);
      const auto lower = *reinterpret_cast<const Halves*>(static_cast<const uint16_t*>(r.master) + i);
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        const uint32_t distance = static_cast<uint32_t>(static_cast<int32_t>(static_cast<int16_t>(lower.elements[k])));
        const uint32_t carry = __float_as_uint(v[k]) >> 31 << 16;
        p[k] = __uint_as_float((static_cast<uint32_t>(upper.elements[k]) << 16) + distance + carry);
        v[k] = __uint_as_float(__float_as_uint(v[k]) & 0x7fffffffu);
      }
    }
  }
  template <int kCount>
  __device__ void store_master(void* to, int64_t i, const float (&p)[kCount], float (&v)[kCount]) const {
    if constexpr (kMaster == StateType::kFloat32) {
      store<DType::kFloat32>(to, i, p);
    } else {
      Pack<uint16_t, kCount> lower;
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        const uint32_t bits = __float_as_uint(p[k]);
        lower.elements[k] = static_cast<uint16_t>(bits);
        if ((bits & 0x1ffffu) == 0x8000u) v[k] = __uint_as_float(__float_as_uint(v[k]) | 0x80000000u);
      }
      *reinterpret_cast<Pack<uint16_t, kCount>*>(static_cast<uint16_t*>(to) + i) = lower;
    }
  }
};

}  // namespace

void adam(const AdamRange& range, const AdamScalars& scalars, cudaStream_t stream) {
  const bool whole_moments = range.momentum_type == StateType::kFloat32 && range.variance_type == StateType::kFloat32;
  if (!whole_moments || range.master_type == StateType::kNone) {
    return adam_by_blocks(range, scalars, stream);
  }
  const bool aligned = is_aligned(range.master, state_bytes(range.master_type, kFloatPack)) &&
                       is_aligned(range.momentum, 16) && is_aligned(range.variance, 16) &&
                       is_aligned(range.grad, kFloatPack * element_size(range.grad_dtype)) &&
                       is_aligned(range.param, kFloatPack * element_size(range.param_dtype));
  with_dtype(range.grad_dtype, [&](auto grad) {
    if (range.master_type == StateType::kLowerHalf) {
      const AdamBody<decltype(grad)::value, DType::kBFloat16, StateType::kLowerHalf> body{range, scalars};
      return launch<kFloatPack>("adam", body, aligned, range.numel, stream);
    }
    with_dtype(range.param_dtype, [&](auto param) {
      const AdamBody<decltype(grad)::value, decltype(param)::value, StateType::kFloat32> body{range, scalars};
      launch<kFloatPack>("adam", body, aligned, range.numel, stream);
    });
  });
}

}  // namespace patrickstar::optim::cuda
