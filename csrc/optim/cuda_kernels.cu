// The leaf kernels on the device. Torch-free. The numerics are those of [Note: one order of operations] and
// [Note: one order of summation] in kernels.h and of the note on NaN in kernel_body.inl; intrinsics with an
// explicit rounding mode keep the compiler from contracting, whatever its flags.
#include <cstdint>

#include "common/cuda_elementwise.h"
#include "optim/cuda_kernels.h"

namespace patrickstar::optim::cuda {

namespace {

using namespace patrickstar::cuda;

// Elements per thread where a binary32 array takes part: 16 bytes of it.
constexpr int kFloatPack = 4;

// ---- Bodies ------------------------------------------------------------------------------------------

// A thread loads all of its elements before it stores any, so `param` may be `grad`.
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
    for (int k = 0; k < kCount; ++k) update(g[k], p[k], m[k], v[k]);
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

  __device__ void update(float g, float& p, float& m, float& v) const {
    g = __fmul_rn(g, s.grad_scale);
    g = __fmaf_rn(s.weight_decay, p, g);
    p = __fmul_rn(p, s.decay);
    m = quiet(__fmaf_rn(s.one_minus_beta1, __fsub_rn(g, m), m));
    v = quiet(__fmaf_rn(__fmul_rn(s.one_minus_beta2, g), g, __fmul_rn(s.beta2, v)));
    const float d = __fmaf_rn(__fsqrt_rn(v), s.inv_sqrt_bias_correction2, s.eps);
    p = quiet(__fmaf_rn(-s.step_size, __fdiv_rn(m, d), p));
  }
};

template <DType kIn, DType kOut>
struct CastBody {
  const void* in;
  void* out;

  template <int kCount>
  __device__ void run(int64_t i) const {
    float x[kCount];
    load<kIn>(in, i, x);
    store<kOut>(out, i, x);
  }
};

template <DType kSum, DType kIn>
struct AddBody {
  void* sum;
  const void* x;

  template <int kCount>
  __device__ void run(int64_t i) const {
    float a[kCount], b[kCount];
    load<kSum>(sum, i, a);
    load<kIn>(x, i, b);
#pragma unroll
    for (int k = 0; k < kCount; ++k) a[k] = quiet(__fadd_rn(a[k], b[k]));
    store<kSum>(sum, i, a);
  }
};

// One block of threads per block of elements, thread l for lane l: [Note: one order of summation].
template <DType kType>
__global__ void __launch_bounds__(kSquaresLanes) squares(const void* x, int64_t numel, double* partials) {
  using Element = typename Storage<kType>::Element;
  const int lane = static_cast<int>(threadIdx.x);
  __shared__ double upper[kSquaresLanes / 2];
  for (int64_t block = blockIdx.x; block * kSquaresBlock < numel; block += gridDim.x) {
    const int64_t begin = block * kSquaresBlock;
    const int64_t end = begin + kSquaresBlock < numel ? begin + kSquaresBlock : numel;
    double sum = 0.0;
#pragma unroll 8
    for (int64_t i = begin + lane; i < end; i += kSquaresLanes) {
      const double wide = to_float<kType>(static_cast<const Element*>(x)[i]);
      sum = __fma_rn(wide, wide, sum);
    }
    if (lane >= kSquaresLanes / 2) upper[lane - kSquaresLanes / 2] = sum;
    __syncthreads();
    if (lane < kSquaresLanes / 2) {
      sum = __dadd_rn(sum, upper[lane]);
      // Lanes from s on add what no one reads.
      for (int s = kSquaresLanes / 4; s > 0; s /= 2) sum = __dadd_rn(sum, __shfl_down_sync(0xffffffffu, sum, s));
      if (lane == 0) partials[block] = sum == sum ? sum : __longlong_as_double(0x7ff8000000000000ll);
    }
    __syncthreads();
  }
}
static_assert(kSquaresLanes == 64, "the fold in squares() takes two warps");

}  // namespace

void adam(const AdamRange& range, const AdamScalars& scalars, cudaStream_t stream) {
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

void cast_from_float(const float* in, void* out, DType out_dtype, int64_t numel, cudaStream_t stream) {
  const bool aligned = is_aligned(in, 16) && is_aligned(out, kFloatPack * element_size(out_dtype));
  with_dtype(out_dtype, [&](auto type) {
    const CastBody<DType::kFloat32, decltype(type)::value> body{in, out};
    launch<kFloatPack>("cast_from_float", body, aligned, numel, stream);
  });
}

void cast_to_float(const void* in, DType in_dtype, float* out, int64_t numel, cudaStream_t stream) {
  const bool aligned = is_aligned(in, kFloatPack * element_size(in_dtype)) && is_aligned(out, 16);
  with_dtype(in_dtype, [&](auto type) {
    const CastBody<decltype(type)::value, DType::kFloat32> body{in, out};
    launch<kFloatPack>("cast_to_float", body, aligned, numel, stream);
  });
}

void add(void* sum, const void* x, DType dtype, int64_t numel, cudaStream_t stream) {
  const bool aligned = is_aligned(sum, 16) && is_aligned(x, 16);
  with_dtype(dtype, [&](auto type) {
    constexpr DType kType = decltype(type)::value;
    constexpr int kPack = static_cast<int>(16 / sizeof(typename Storage<kType>::Element));
    launch<kPack>("add", AddBody<kType, kType>{sum, x}, aligned, numel, stream);
  });
}

void add_to_float(float* sum, const void* x, DType x_dtype, int64_t numel, cudaStream_t stream) {
  const bool aligned = is_aligned(sum, 16) && is_aligned(x, kFloatPack * element_size(x_dtype));
  with_dtype(x_dtype, [&](auto type) {
    const AddBody<DType::kFloat32, decltype(type)::value> body{sum, x};
    launch<kFloatPack>("add_to_float", body, aligned, numel, stream);
  });
}

void sum_squares(const void* x, DType dtype, int64_t numel, double* partials, cudaStream_t stream) {
  if (numel <= 0) return;
  const unsigned blocks = num_blocks(num_square_partials(numel), 1);
  with_dtype(dtype, [&](auto type) {
    squares<decltype(type)::value><<<blocks, kSquaresLanes, 0, stream>>>(x, numel, partials);
    check_launch("sum_squares", numel);
  });
}

void expand_state(StateType type, const void* data, const float*, float* out, int64_t numel, cudaStream_t stream) {
  if (type == StateType::kFloat32) cast_to_float(data, DType::kFloat32, out, numel, stream);
}

void compress_state(const float* in, StateType type, void* out, float*, int64_t numel, const RandomKey&,
                    cudaStream_t stream) {
  if (type == StateType::kFloat32) cast_from_float(in, out, DType::kFloat32, numel, stream);
}

}  // namespace patrickstar::optim::cuda
