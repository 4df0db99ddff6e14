// The leaf kernels on the device. Torch-free. The numerics are those of [Note: one order of operations] and
// [Note: one order of summation] in kernels.h and of the note on NaN in kernel_body.inl; intrinsics with an
// explicit rounding mode keep the compiler from contracting, whatever its flags.
#include <cuda_fp16.h>

#include <cstdint>

#include "common/check.h"
#include "optim/cuda_kernels.h"

namespace patrickstar::optim::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int64_t kMaxBlocks = int64_t{1} << 30;

template <DType kType>
struct Storage {
  using Element = uint16_t;
};
template <>
struct Storage<DType::kFloat32> {
  using Element = float;
};

// kCount elements that one instruction moves: 16 bytes of binary32, 8 or 16 bytes of a 16-bit type.
template <class Element, int kCount>
struct alignas(sizeof(Element) * kCount) Pack {
  Element elements[kCount];
};

__device__ inline float quiet(float x) { return x == x ? x : __uint_as_float(0x7fc00000u); }

__device__ inline uint16_t bf16_from_float(float x) {
  const uint32_t bits = __float_as_uint(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

__device__ inline uint16_t f16_from_float(float x) {
  return x == x ? __half_as_ushort(__float2half_rn(x)) : static_cast<uint16_t>(0x7e00);
}

// A NaN keeps its payload and becomes quiet, as on the CPU.
__device__ inline float float_from_f16(uint16_t half) {
  const uint32_t magnitude = half & 0x7fffu;
  if (magnitude > 0x7c00u) {
    return __uint_as_float((static_cast<uint32_t>(half & 0x8000u) << 16) | 0x7fc00000u | (magnitude << 13));
  }
  return __half2float(__ushort_as_half(half));
}

template <DType kType>
__device__ inline float to_float(typename Storage<kType>::Element x) {
  if constexpr (kType == DType::kFloat32) {
    return x;
  } else if constexpr (kType == DType::kBFloat16) {
    return __uint_as_float(static_cast<uint32_t>(x) << 16);
  } else {
    return float_from_f16(x);
  }
}

template <DType kType>
__device__ inline typename Storage<kType>::Element from_float(float x) {
  if constexpr (kType == DType::kFloat32) {
    return x;
  } else if constexpr (kType == DType::kBFloat16) {
    return bf16_from_float(x);
  } else {
    return f16_from_float(x);
  }
}

template <DType kType, int kCount>
__device__ inline void load(const void* base, int64_t i, float (&out)[kCount]) {
  using Element = typename Storage<kType>::Element;
  const auto pack = *reinterpret_cast<const Pack<Element, kCount>*>(static_cast<const Element*>(base) + i);
#pragma unroll
  for (int k = 0; k < kCount; ++k) out[k] = to_float<kType>(pack.elements[k]);
}

template <DType kType, int kCount>
__device__ inline void store(void* base, int64_t i, const float (&in)[kCount]) {
  using Element = typename Storage<kType>::Element;
  Pack<Element, kCount> pack;
#pragma unroll
  for (int k = 0; k < kCount; ++k) pack.elements[k] = from_float<kType>(in[k]);
  *reinterpret_cast<Pack<Element, kCount>*>(static_cast<Element*>(base) + i) = pack;
}

// ---- Launching ---------------------------------------------------------------------------------------

// Packs of kPack elements while they last, then single elements. Without alignment: num_packs = 0.
template <int kPack, class Body>
__global__ void __launch_bounds__(kThreads) elementwise(Body body, int64_t num_packs, int64_t numel) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = first; i < num_packs; i += step) body.template run<kPack>(i * kPack);
  for (int64_t i = num_packs * kPack + first; i < numel; i += step) body.template run<1>(i);
}

void check_launch(const char* kernel, int64_t numel) {
  const cudaError_t error = cudaGetLastError();
  PS_CHECK(error == cudaSuccess, SystemError, "the CUDA kernel ", kernel, " on ", numel,
           " elements was not launched: ", cudaGetErrorString(error),
           error == cudaErrorNoKernelImageForDevice
               ? "; rebuild PatrickStar with TORCH_CUDA_ARCH_LIST naming this GPU's compute capability"
               : "; if an earlier kernel caused it, CUDA_LAUNCH_BLOCKING=1 shows which");
}

unsigned num_blocks(int64_t work, int64_t per_block) {
  const int64_t blocks = (work + per_block - 1) / per_block;
  return static_cast<unsigned>(blocks < kMaxBlocks ? blocks : kMaxBlocks);
}

template <int kPack, class Body>
void launch(const char* kernel, const Body& body, bool aligned, int64_t numel, cudaStream_t stream) {
  if (numel <= 0) return;
  const int64_t num_packs = aligned ? numel / kPack : 0;
  const int64_t work = num_packs > 0 ? num_packs : numel;
  elementwise<kPack><<<num_blocks(work, kThreads), kThreads, 0, stream>>>(body, num_packs, numel);
  check_launch(kernel, numel);
}

bool is_aligned(const void* pointer, int64_t num_bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % static_cast<uintptr_t>(num_bytes) == 0;
}

template <DType kType>
struct Tag {
  static constexpr DType value = kType;
};

template <class Body>
void with_dtype(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kFloat32:
      return body(Tag<DType::kFloat32>());
    case DType::kBFloat16:
      return body(Tag<DType::kBFloat16>());
    case DType::kFloat16:
      return body(Tag<DType::kFloat16>());
  }
}

// Elements per thread where a binary32 array takes part: 16 bytes of it.
constexpr int kFloatPack = 4;

// ---- Bodies ------------------------------------------------------------------------------------------

// A thread loads all of its elements before it stores any, so `param` may be `grad`.
template <DType kGrad, DType kParam>
struct AdamBody {
  AdamRange r;
  AdamScalars s;

  template <int kCount>
  __device__ void run(int64_t i) const {
    float g[kCount], p[kCount], m[kCount], v[kCount];
    load<kGrad>(r.grad, i, g);
    load<DType::kFloat32>(r.master, i, p);
    load<DType::kFloat32>(r.momentum, i, m);
    load<DType::kFloat32>(r.variance, i, v);
#pragma unroll
    for (int k = 0; k < kCount; ++k) update(g[k], p[k], m[k], v[k]);
    const bool apart = r.new_master != nullptr;
    store<DType::kFloat32>(apart ? r.new_master : r.master, i, p);
    store<DType::kFloat32>(apart ? r.new_momentum : r.momentum, i, m);
    store<DType::kFloat32>(apart ? r.new_variance : r.variance, i, v);
    if (r.param != nullptr) store<kParam>(r.param, i, p);
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
  const bool aligned = is_aligned(range.master, 16) && is_aligned(range.momentum, 16) &&
                       is_aligned(range.variance, 16) &&
                       is_aligned(range.grad, kFloatPack * element_size(range.grad_dtype)) &&
                       is_aligned(range.param, kFloatPack * element_size(range.param_dtype));
  with_dtype(range.grad_dtype, [&](auto grad) {
    with_dtype(range.param_dtype, [&](auto param) {
      const AdamBody<decltype(grad)::value, decltype(param)::value> body{range, scalars};
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

}  // namespace patrickstar::optim::cuda
