// Kernels of cuda_kernels.h. A thread block has a tile of 128 x 128 elements in its registers; both results come from
// one read. Torch-free.
#include "backend/cuda_check.h"
#include "fp8/cuda_tile.h"

namespace patrickstar::fp8::cuda {

namespace {

using patrickstar::cuda::check_launch;

constexpr int kMeasured = 4;  // tiles of a thread block in the first of two passes

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
  __shared__ uint2 turned[kTile * kPacks];
  const int64_t num_tile_columns = args.num_columns / kTile;
  const Place place = place_of(blockIdx.x / num_tile_columns, blockIdx.x % num_tile_columns);
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
  auto* out = static_cast<uint8_t*>(args.transposed) + place.tile_column * kTile * args.padded_rows;
  write_transposed<kFormat>(tile, columns, turned, out + place.tile_row * kTile, args.padded_rows);
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
