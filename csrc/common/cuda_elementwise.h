// Helpers of elementwise kernels: casts between chunk elements and binary32, and launches over packs of 16 bytes.
//
// For .cu files. Casts give the bits of common/elements.inl; a NaN stored in 16 bits becomes canonical. A body has
// `template <int kCount> __device__ void run(int64_t i) const` for elements i to i + kCount:
//
//   launch<kPack>("add", AddBody{sum, x}, is_aligned(sum, 16) && is_aligned(x, 16), numel, stream);
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/check.h"
#include "common/dtype.h"

namespace patrickstar::cuda {

constexpr int kThreads = 256;
constexpr int64_t kMaxBlocks = int64_t{1} << 30;
// Elements of a thread if a binary32 array takes part: 16 bytes of it.
constexpr int kFloatPack = 4;

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

// Processes packs of kPack elements, then the rest one by one. Unaligned data: num_packs = 0.
template <int kPack, class Body>
__global__ void __launch_bounds__(kThreads) elementwise(Body body, int64_t num_packs, int64_t numel) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = first; i < num_packs; i += step) body.template run<kPack>(i * kPack);
  for (int64_t i = num_packs * kPack + first; i < numel; i += step) body.template run<1>(i);
}

inline void check_launch(const char* kernel, int64_t numel) {
  const cudaError_t error = cudaGetLastError();
  PS_CHECK(error == cudaSuccess, SystemError, "the CUDA kernel ", kernel, " on ", numel,
           " elements was not launched: ", cudaGetErrorString(error),
           error == cudaErrorNoKernelImageForDevice
               ? "; rebuild PatrickStar with TORCH_CUDA_ARCH_LIST naming this GPU's compute capability"
               : "; if an earlier kernel caused it, CUDA_LAUNCH_BLOCKING=1 shows which");
}

inline unsigned num_blocks(int64_t work, int64_t per_block) {
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

inline bool is_aligned(const void* pointer, int64_t num_bytes) {
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

}  // namespace patrickstar::cuda
