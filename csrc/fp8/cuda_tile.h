// A tile of 128 x 128 elements in the registers of a thread block, and scales of 8 bits. For .cu files of this folder.
#pragma once

#include <cuda_fp8.h>

#include "common/cuda_elementwise.h"
#include "fp8/cuda_kernels.h"

namespace patrickstar::fp8::cuda {

using patrickstar::cuda::kThreads;

constexpr int kPack = 8;               // elements of 16 bytes
constexpr int kPacks = kTile / kPack;  // of a row
constexpr int kRows = kTile / kPacks;  // of a thread: neighbours
constexpr int kWarps = kThreads / 32;
constexpr uint32_t kMagnitudes = 0x7fff7fffu;  // of two bfloat16 elements
constexpr uint32_t kInfinity = 0x7f80u;

static_assert(kThreads == kPacks * kPacks, "a thread has kRows rows of one pack");

struct Scale {
  float value;
  float inverse;
};

// `largest`: bits of the largest magnitude, a bfloat16.
template <Format kFormat>
__device__ inline Scale scale_of(uint32_t largest) {
  if (largest == 0) return {1.0f, 1.0f};
  if (largest >= kInfinity) return {__uint_as_float(0x7fc00000u), __uint_as_float(0x7fc00000u)};
  // The largest code is 1.75 * 2^kTop.
  constexpr int kTop = kFormat == Format::kE4M3 ? 8 : 15;
  const int exponent = static_cast<int>(largest >> 7) - kTop + ((largest & 0x7fu) > 0x60u ? 1 : 0);
  const auto biased = static_cast<uint32_t>(exponent < 1 ? 1 : exponent);  // scale and inverse are normal numbers
  return {__uint_as_float(biased << 23), __uint_as_float((254u - biased) << 23)};
}

__device__ inline float low_half(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ inline float high_half(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

template <Format kFormat>
__device__ inline uint32_t two_codes(float first, float second) {
  constexpr auto kInterpretation = kFormat == Format::kE4M3 ? __NV_E4M3 : __NV_E5M2;
  return __nv_cvt_float2_to_fp8x2(make_float2(first, second), __NV_SATFINITE, kInterpretation);
}

__device__ inline uint32_t larger_of_halves(uint32_t pair) {
  const uint32_t low = pair & 0xffffu, high = pair >> 16;
  return low > high ? low : high;
}

// The largest magnitudes of both columns' halves over a row's lanes.
__device__ inline uint32_t of_row(uint32_t pair) {
#pragma unroll
  for (int distance = kPacks / 2; distance > 0; distance /= 2) {
    pair = __vmaxu2(pair, __shfl_xor_sync(0xffffffffu, pair, distance));
  }
  return pair;
}

__device__ inline uint32_t largest_in_warp(uint32_t x) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    const uint32_t other = __shfl_xor_sync(0xffffffffu, x, distance);
    x = x > other ? x : other;
  }
  return x;
}

// One tile's part of x. Thread t has rows kRows * (t / kPacks) to + kRows of pack t % kPacks.
struct Tile {
  uint32_t words[kRows][kPack / 2];

  __device__ void load(const Cast& args, int64_t row, int64_t column) {
    const auto* x = static_cast<const uint16_t*>(args.x);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      uint4 pack = make_uint4(0, 0, 0, 0);
      if (row + i < args.num_rows) {
        pack = __ldg(reinterpret_cast<const uint4*>(x + (row + i) * args.num_columns + column));
      }
      set_row(i, pack);
    }
  }

  __device__ void set_row(int i, const uint4& pack) {
    words[i][0] = pack.x;
    words[i][1] = pack.y;
    words[i][2] = pack.z;
    words[i][3] = pack.w;
  }

  // Raises the pairs in `found` to the largest magnitudes of the thread's part of each row.
  __device__ void add_largest_of_rows(uint32_t (&found)[kRows]) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int w = 0; w < kPack / 2; ++w) found[i] = __vmaxu2(found[i], words[i][w] & kMagnitudes);
    }
  }

  // The largest magnitudes of rows, in all lanes of a row.
  __device__ void largest_of_rows(uint32_t (&found)[kRows]) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i) found[i] = 0;
    add_largest_of_rows(found);
#pragma unroll
    for (int i = 0; i < kRows; ++i) found[i] = larger_of_halves(of_row(found[i]));
  }

  // The largest magnitudes of the thread's columns in the whole tile. `shared`: kWarps x kTile / 2 words.
  __device__ void largest_of_columns(uint32_t* shared, uint32_t (&found)[kPack]) const {
    const int thread = static_cast<int>(threadIdx.x), pack = thread % kPacks;
#pragma unroll
    for (int w = 0; w < kPack / 2; ++w) {
      uint32_t pair = 0;
#pragma unroll
      for (int i = 0; i < kRows; ++i) pair = __vmaxu2(pair, words[i][w] & kMagnitudes);
      pair = __vmaxu2(pair, __shfl_xor_sync(0xffffffffu, pair, kPacks));
      if (thread % 32 < kPacks) shared[thread / 32 * (kTile / 2) + pack * (kPack / 2) + w] = pair;
    }
    __syncthreads();
    if (thread < kTile / 2) {
      uint32_t pair = shared[thread];
#pragma unroll
      for (int warp = 1; warp < kWarps; ++warp) pair = __vmaxu2(pair, shared[warp * (kTile / 2) + thread]);
      shared[thread] = pair;
    }
    __syncthreads();
#pragma unroll
    for (int w = 0; w < kPack / 2; ++w) {
      const uint32_t pair = shared[pack * (kPack / 2) + w];
      found[2 * w] = pair & 0xffffu;
      found[2 * w + 1] = pair >> 16;
    }
  }

  // The largest magnitude of the thread's part.
  __device__ uint32_t largest() const {
    uint32_t pair = 0;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int w = 0; w < kPack / 2; ++w) pair = __vmaxu2(pair, words[i][w] & kMagnitudes);
    }
    return larger_of_halves(pair);
  }

  // The largest magnitude of the tile.
  __device__ uint32_t largest(uint32_t* shared) const {
    const uint32_t in_warp = largest_in_warp(largest());
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = in_warp;
    __syncthreads();
    uint32_t found = shared[0];
#pragma unroll
    for (int warp = 1; warp < kWarps; ++warp) found = found > shared[warp] ? found : shared[warp];
    return found;
  }
};

struct Place {
  int64_t tile_row;
  int64_t tile_column;
  int64_t row;  // of the thread's first element
  int64_t column;
};

__device__ inline Place place_of(int64_t tile_row, int64_t tile_column) {
  const int64_t row = tile_row * kTile + threadIdx.x / kPacks * kRows;
  return {tile_row, tile_column, row, tile_column * kTile + threadIdx.x % kPacks * kPack};
}

// Writes a tile's columns as rows of `out`, `stride` bytes apart, with the scales of the thread's columns. `out`: the
// tile's first code. `turned`: memory for kTile * kPacks elements.
template <Format kFormat>
__device__ inline void write_transposed(const Tile& tile, const Scale (&columns)[kPack], uint2* turned, uint8_t* out,
                                        int64_t stride) {
  const int pack = static_cast<int>(threadIdx.x) % kPacks, group = static_cast<int>(threadIdx.x) / kPacks;
#pragma unroll
  for (int k = 0; k < kPack; ++k) {
    uint32_t pairs[kRows / 2];
#pragma unroll
    for (int i = 0; i < kRows; i += 2) {
      const uint32_t first = tile.words[i][k / 2], second = tile.words[i + 1][k / 2];
      const float by = columns[k].inverse;
      pairs[i / 2] = k % 2 == 0 ? two_codes<kFormat>(low_half(first) * by, low_half(second) * by)
                                : two_codes<kFormat>(high_half(first) * by, high_half(second) * by);
    }
    // [column][kRows rows], the latter swizzled by the column's pack
    turned[(pack * kPack + k) * kPacks + (group ^ pack)] =
        make_uint2(pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16);
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int column = group + i * kPacks;
    *reinterpret_cast<uint2*>(out + column * stride + pack * kRows) = turned[column * kPacks + (pack ^ column / kPack)];
  }
}

}  // namespace patrickstar::fp8::cuda
