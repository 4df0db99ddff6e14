// Dequantisation on CUDA, codes and scales in one pass (kernels.h). Torch-free. Intrinsics with an explicit rounding
// mode keep the compiler from contracting.
#include <cstdint>

#include "common/cuda_elementwise.h"
#include "quant/cuda_kernels.h"
#include "quant/maps.h"

namespace patrickstar::quant::cuda {

namespace {

using namespace patrickstar::cuda;

// Elements per thread: 16 bytes of a 16-bit type, within one block of either quantised type.
constexpr int kPack = 8;
static_assert(kNf4Block % kPack == 0 && kInt8Block % kPack == 0);

__constant__ const Nf4Map kDeviceNf4Map = kNf4Map;
__constant__ const DynamicMap kDeviceDynamicMap = kDynamicMap;

// In shared memory: lanes of a warp read different entries at once, which constant memory would serialise.
struct SharedMaps {
  float nf4[16];
  float dynamic[256];

  __device__ void fill() {
    if (threadIdx.x < 16) nf4[threadIdx.x] = kDeviceNf4Map.values[threadIdx.x];
    for (unsigned i = threadIdx.x; i < 256; i += kThreads) dynamic[i] = kDeviceDynamicMap.values[i];
    __syncthreads();
  }
};

struct Nf4Body {
  QuantizedPart from;

  template <int kCount>
  __device__ void decode(const SharedMaps& maps, int64_t i, float (&x)[kCount]) const {
    const float block_scale = maps.dynamic[from.block_scales[i / kNf4Block]];
    const float super = from.scales[(from.first + i) / kNf4SuperBlock];
    const float scale = __fadd_rn(__fmul_rn(block_scale, super), *from.offset);
    if constexpr (kCount == 1) {
      const uint32_t byte = from.codes[i / 2];
      x[0] = __fmul_rn(maps.nf4[i % 2 == 0 ? byte >> 4 : byte & 15u], scale);
    } else {
      const auto bytes = *reinterpret_cast<const Pack<uint8_t, kCount / 2>*>(from.codes + i / 2);
#pragma unroll
      for (int k = 0; k < kCount / 2; ++k) {
        x[2 * k] = __fmul_rn(maps.nf4[bytes.elements[k] >> 4], scale);
        x[2 * k + 1] = __fmul_rn(maps.nf4[bytes.elements[k] & 15u], scale);
      }
    }
  }
};

struct Int8Body {
  QuantizedPart from;

  template <int kCount>
  __device__ void decode(const SharedMaps& /*maps*/, int64_t i, float (&x)[kCount]) const {
    const float scale = from.scales[i / kInt8Block];
    const auto codes = *reinterpret_cast<const Pack<int8_t, kCount>*>(from.codes + i);
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      x[k] = __fmul_rn(__fmul_rn(static_cast<float>(codes.elements[k]), scale), kInt8Step);
    }
  }
};

// Stores a thread's elements; two stores for a 32-bit type.
template <DType kType, int kCount>
__device__ inline void store_all(void* out, int64_t i, const float (&x)[kCount]) {
  if constexpr (kType == DType::kFloat32 && kCount > 4) {
    float lower[4], upper[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      lower[k] = x[k];
      upper[k] = x[k + 4];
    }
    store<kType>(out, i, lower);
    store<kType>(out, i + 4, upper);
  } else {
    store<kType>(out, i, x);
  }
}

template <DType kType, class Body>
__global__ void __launch_bounds__(kThreads) decode_kernel(Body body, void* out, int64_t num_packs, int64_t numel) {
  __shared__ SharedMaps maps;
  maps.fill();
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t pack = first; pack < num_packs; pack += step) {
    float x[kPack];
    body.template decode<kPack>(maps, pack * kPack, x);
    store_all<kType>(out, pack * kPack, x);
  }
  for (int64_t i = num_packs * kPack + first; i < numel; i += step) {
    float x[1];
    body.template decode<1>(maps, i, x);
    store_all<kType>(out, i, x);
  }
}

// Enough thread blocks to fill any GPU; each fills its maps once.
constexpr int64_t kMostBlocks = 2048;

template <class Body>
void launch_decode(const Body& body, void* out, DType dtype, cudaStream_t stream) {
  const int64_t numel = body.from.numel;
  if (numel <= 0) return;
  const int64_t num_packs = is_aligned(out, 16) && is_aligned(body.from.codes, 8) ? numel / kPack : 0;
  const int64_t work = num_packs > 0 ? num_packs : numel;
  const unsigned wanted = num_blocks(work, kThreads);
  const unsigned blocks = wanted < kMostBlocks ? wanted : static_cast<unsigned>(kMostBlocks);
  with_dtype(dtype, [&](auto type) {
    decode_kernel<type.value><<<blocks, kThreads, 0, stream>>>(body, out, num_packs, numel);
  });
  check_launch("dequantize", numel);
}

}  // namespace

void dequantize(const QuantizedPart& from, void* out, DType dtype, cudaStream_t stream) {
  if (from.type == QuantType::kNf4) {
    launch_decode(Nf4Body{from}, out, dtype, stream);
  } else {
    launch_decode(Int8Body{from}, out, dtype, stream);
  }
}

}  // namespace patrickstar::quant::cuda
