// Kernels of cuda_kernels.h. A thread block has a tile of 128 x 128 elements in its registers; both results come from
// one read. Torch-free.
#include <cuda_fp8.h>

#include "backend/cuda_check.h"
#include "common/cuda_elementwise.h"
#include "fp8/cuda_kernels.h"

namespace patrickstar::fp8::cuda {

namespace {

using patrickstar::cuda::check_launch;
using patrickstar::cuda::kThreads;

constexpr int kPack = 8;               // elements of 16 bytes
constexpr int kPacks = kTile / kPack;  // of a row
constexpr int kRows = kTile / kPacks;  // of a thread: neighbours
constexpr int kWarps = kThreads / 32;
constexpr int kMeasured = 4;                   // tiles of a thread block in the first of two passes
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
      words[i][0] = pack.x;
      words[i][1] = pack.y;
      words[i][2] = pack.z;
      words[i][3] = pack.w;
    }
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

// First of two passes, for blocks that are larger than a tile. A thread block measures kMeasured tiles of one row of
// tiles, and adds its rows' maxima to those of other thread blocks once.
__global__ void __launch_bounds__(kThreads) measure_kernel(Cast args) {
  __shared__ uint32_t shared[kWarps * kTile / 2];
  const int64_t num_tile_columns = args.num_columns / kTile;
  const int64_t num_bands = (num_tile_columns + kMeasured - 1) / kMeasured;
  const int64_t tile_row = blockIdx.x / num_bands, first = blockIdx.x % num_bands * kMeasured;
  uint32_t rows[kRows] = {}, whole = 0;
  for (int64_t tile_column = first; tile_column < first + kMeasured && tile_column < num_tile_columns; ++tile_column) {
    const Place place = place_of(tile_row, tile_column);
    Tile tile;
    tile.load(args, place.row, place.column);
    if (args.block == Block::kMatrix) {
      const uint32_t largest = tile.largest();
      whole = whole > largest ? whole : largest;
      continue;
    }
    if (args.codes != nullptr) tile.add_largest_of_rows(rows);
    if (args.transposed != nullptr) {
      uint32_t columns[kPack];
      tile.largest_of_columns(shared, columns);
      if (threadIdx.x < kPacks) {
#pragma unroll
        for (int k = 0; k < kPack; ++k) atomicMax(args.largest + args.padded_rows + place.column + k, columns[k]);
      }
      __syncthreads();  // the next tile writes `shared`
    }
  }
  if (args.block == Block::kMatrix) {
    whole = largest_in_warp(whole);
    if (threadIdx.x % 32 == 0) atomicMax(args.largest, whole);
  } else if (args.codes != nullptr) {
    const Place place = place_of(tile_row, first);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const uint32_t largest = larger_of_halves(of_row(rows[i]));
      if (threadIdx.x % kPacks == 0) atomicMax(args.largest + place.row + i, largest);
    }
  }
}

template <Block kBlock, Format kFormat>
__device__ inline void find_scales(const Cast& args, const Place& place, const Tile& tile, uint32_t* shared,
                                   Scale (&rows)[kRows], Scale (&columns)[kPack]) {
  if constexpr (kBlock == Block::kSquare || kBlock == Block::kMatrix) {
    const Scale scale = scale_of<kFormat>(kBlock == Block::kSquare ? tile.largest(shared) : *args.largest);
#pragma unroll
    for (int i = 0; i < kRows; ++i) rows[i] = scale;
#pragma unroll
    for (int k = 0; k < kPack; ++k) columns[k] = scale;
    if (threadIdx.x != 0) return;
    const bool is_first = place.tile_row == 0 && place.tile_column == 0;
    if (kBlock == Block::kMatrix && !is_first) return;
    const int64_t at = kBlock == Block::kMatrix ? 0 : place.tile_row * (args.num_columns / kTile) + place.tile_column;
    const int64_t across =
        kBlock == Block::kMatrix ? 0 : place.tile_column * (args.padded_rows / kTile) + place.tile_row;
    if (args.codes != nullptr) args.scales[at] = scale.value;
    if (args.transposed != nullptr) args.transposed_scales[across] = scale.value;
  } else {
    if (args.codes != nullptr) {
      uint32_t largest[kRows];
      if constexpr (kBlock == Block::kStrip) tile.largest_of_rows(largest);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        if constexpr (kBlock == Block::kLine) largest[i] = args.largest[place.row + i];
        rows[i] = scale_of<kFormat>(largest[i]);
        const bool writes = kBlock == Block::kStrip || place.tile_column == 0;
        const int64_t line = kBlock == Block::kStrip ? place.tile_column * args.padded_rows : 0;
        if (writes && threadIdx.x % kPacks == 0) args.scales[line + place.row + i] = rows[i].value;
      }
    }
    if (args.transposed != nullptr) {
      uint32_t largest[kPack];
      if constexpr (kBlock == Block::kStrip) tile.largest_of_columns(shared, largest);
#pragma unroll
      for (int k = 0; k < kPack; ++k) {
        if constexpr (kBlock == Block::kLine) largest[k] = args.largest[args.padded_rows + place.column + k];
        columns[k] = scale_of<kFormat>(largest[k]);
        const bool writes = kBlock == Block::kStrip || place.tile_row == 0;
        const int64_t line = kBlock == Block::kStrip ? place.tile_row * args.num_columns : 0;
        if (writes && threadIdx.x < kPacks) args.transposed_scales[line + place.column + k] = columns[k].value;
      }
    }
  }
}

template <Block kBlock, Format kFormat>
__global__ void __launch_bounds__(kThreads) cast_kernel(Cast args) {
  __shared__ uint32_t shared[kWarps * kTile / 2];
  __shared__ uint2 turned[kTile * kPacks];  // [column][kRows rows], the latter swizzled by the column's pack
  const int64_t num_tile_columns = args.num_columns / kTile;
  const Place place = place_of(blockIdx.x / num_tile_columns, blockIdx.x % num_tile_columns);
  const int pack = static_cast<int>(threadIdx.x) % kPacks, group = static_cast<int>(threadIdx.x) / kPacks;
  Tile tile;
  tile.load(args, place.row, place.column);
  Scale rows[kRows], columns[kPack];
  find_scales<kBlock, kFormat>(args, place, tile, shared, rows, columns);
  if (args.codes != nullptr) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      uint32_t pairs[kPack / 2];
#pragma unroll
      for (int w = 0; w < kPack / 2; ++w) {
        const float by = rows[i].inverse;
        pairs[w] = two_codes<kFormat>(low_half(tile.words[i][w]) * by, high_half(tile.words[i][w]) * by);
      }
      auto* out = static_cast<uint8_t*>(args.codes) + (place.row + i) * args.num_columns + place.column;
      *reinterpret_cast<uint2*>(out) = make_uint2(pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16);
    }
  }
  if (args.transposed == nullptr) return;
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
    turned[(pack * kPack + k) * kPacks + (group ^ pack)] =
        make_uint2(pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16);
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int column = group + i * kPacks;
    auto* out = static_cast<uint8_t*>(args.transposed) + (place.tile_column * kTile + column) * args.padded_rows +
                place.tile_row * kTile + pack * kRows;
    *reinterpret_cast<uint2*>(out) = turned[column * kPacks + (pack ^ column / kPack)];
  }
}

template <Block kBlock>
void launch(const Cast& args, unsigned num_tiles, cudaStream_t stream) {
  if (args.format == Format::kE4M3) {
    cast_kernel<kBlock, Format::kE4M3><<<num_tiles, kThreads, 0, stream>>>(args);
  } else {
    cast_kernel<kBlock, Format::kE5M2><<<num_tiles, kThreads, 0, stream>>>(args);
  }
}

}  // namespace

void cast(const Cast& args, cudaStream_t stream) {
  const int64_t numel = args.padded_rows * args.num_columns;
  if (numel == 0) return;
  PS_CHECK(args.padded_rows % kTile == 0 && args.num_columns % kTile == 0, ArgumentError, "a matrix of ",
           args.padded_rows, " x ", args.num_columns, " elements is not made of tiles of 128 x 128");
  const auto num_tiles = static_cast<unsigned>(numel / (kTile * kTile));
  if (args.block == Block::kLine || args.block == Block::kMatrix) {
    const int64_t num_scales = args.block == Block::kMatrix ? 1 : args.padded_rows + args.num_columns;
    PS_CUDA_CHECK(cudaMemsetAsync(args.largest, 0, static_cast<size_t>(num_scales) * sizeof(uint32_t), stream));
    const int64_t num_bands = (args.num_columns / kTile + kMeasured - 1) / kMeasured;
    const auto num_blocks = static_cast<unsigned>(args.padded_rows / kTile * num_bands);
    measure_kernel<<<num_blocks, kThreads, 0, stream>>>(args);
    check_launch("fp8 measure", numel);
  }
  switch (args.block) {
    case Block::kStrip:
      launch<Block::kStrip>(args, num_tiles, stream);
      break;
    case Block::kSquare:
      launch<Block::kSquare>(args, num_tiles, stream);
      break;
    case Block::kLine:
      launch<Block::kLine>(args, num_tiles, stream);
      break;
    case Block::kMatrix:
      launch<Block::kMatrix>(args, num_tiles, stream);
      break;
  }
  check_launch("fp8 cast", numel);
}

}  // namespace patrickstar::fp8::cuda
