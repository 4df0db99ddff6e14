// Kernels of cuda_groups.h. Torch-free.
#include "backend/cuda_check.h"
#include "common/cuda_swiglu.h"
#include "fp8/cuda_groups.h"
#include "fp8/cuda_tile.h"

namespace patrickstar::fp8::cuda {

namespace {

using namespace patrickstar::cuda;

constexpr int kKept = 8;  // packs of a row that a lane holds between the two passes

// ---- Rows --------------------------------------------------------------------------------------------

__device__ inline void load_pack(const void* base, int64_t i, float (&out)[kPack]) {
  load<DType::kBFloat16>(base, i, out);
}

__device__ inline uint4 bfloat16_pack(const float (&x)[kPack]) {
  uint32_t words[kPack / 2];
#pragma unroll
  for (int w = 0; w < kPack / 2; ++w) {
    const uint32_t low = bf16_from_float(x[2 * w]), high = bf16_from_float(x[2 * w + 1]);
    words[w] = low | high << 16;
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// A source gives the packs of a row, 8 elements of bfloat16 each: begin() with the row, load() of its packs, finish()
// when the warp has loaded each pack once.
struct Stored {
  const void* x;
  int64_t num_columns;
  const uint4* packs = nullptr;

  __device__ void begin(int64_t row) { packs = static_cast<const uint4*>(x) + row * (num_columns / kPack); }
  __device__ uint4 load(int64_t pack) { return __ldg(packs + pack); }
  __device__ void finish(int64_t, int) {}
};

struct Gated {
  const void* gate_up;
  int64_t num_columns;
  int64_t first = 0;

  __device__ void begin(int64_t row) { first = row * 2 * num_columns; }

  __device__ uint4 load(int64_t pack) {
    float gate[kPack], up[kPack];
    load_pack(gate_up, first + pack * kPack, gate);
    load_pack(gate_up, first + num_columns + pack * kPack, up);
#pragma unroll
    for (int j = 0; j < kPack; ++j) up[j] = swiglu<DType::kBFloat16>(gate[j], up[j]);
    return bfloat16_pack(up);
  }

  __device__ void finish(int64_t, int) {}
};

struct GateGradient {
  const void* gate_up;
  const void* grad_out;
  int64_t width;  // of grad_out; gate_up has two of them
  int64_t first = 0;

  __device__ void begin(int64_t row) { first = row * width; }

  __device__ uint4 load(int64_t pack) {
    const bool is_gate = pack * kPack < width;
    const int64_t column = is_gate ? pack * kPack : pack * kPack - width;
    float gate[kPack], up[kPack], grad[kPack];
    load_pack(gate_up, 2 * first + column, gate);
    load_pack(grad_out, first + column, grad);
    if (is_gate) {
      load_pack(gate_up, 2 * first + width + column, up);
#pragma unroll
      for (int j = 0; j < kPack; ++j) up[j] = gradient_of_gate<DType::kBFloat16>(gate[j], up[j], grad[j]);
    } else {
#pragma unroll
      for (int j = 0; j < kPack; ++j) up[j] = gradient_of_up<DType::kBFloat16>(gate[j], grad[j]);
    }
    return bfloat16_pack(up);
  }

  __device__ void finish(int64_t, int) {}
};

// Sums have the order of scale_rows() in experts/cuda_kernels.cu.
struct Weighted {
  WeightedRows args;
  int64_t num_columns;
  int64_t in_rows = 0, in_grad = 0;
  float weight = 0.0f, dot = 0.0f;

  __device__ void begin(int64_t row) {
    in_rows = row * num_columns;
    in_grad = args.tokens[row] * num_columns;
    weight = args.weights[row];
    dot = 0.0f;
  }

  __device__ uint4 load(int64_t pack) {
    float grad[kPack], x[kPack];
    load_pack(args.grad_out, in_grad + pack * kPack, grad);
    load_pack(args.rows, in_rows + pack * kPack, x);
#pragma unroll
    for (int j = 0; j < kPack; ++j) {
      dot = __fadd_rn(dot, __fmul_rn(grad[j], x[j]));
      grad[j] = __fmul_rn(weight, grad[j]);
    }
    return bfloat16_pack(grad);
  }

  __device__ void finish(int64_t row, int lane) {
    for (int distance = 16; distance > 0; distance /= 2) {
      dot = __fadd_rn(dot, __shfl_down_sync(0xffffffffu, dot, distance));
    }
    if (lane == 0) args.grad_weights[row] = dot;
  }
};

__device__ inline uint32_t larger_magnitudes(uint32_t found, const uint4& pack) {
  found = __vmaxu2(__vmaxu2(found, pack.x & kMagnitudes), pack.y & kMagnitudes);
  return __vmaxu2(__vmaxu2(found, pack.z & kMagnitudes), pack.w & kMagnitudes);
}

__device__ inline uint2 codes_of(const uint4& pack, float by) {
  const uint32_t words[kPack / 2] = {pack.x, pack.y, pack.z, pack.w};
  uint32_t pairs[kPack / 2];
#pragma unroll
  for (int w = 0; w < kPack / 2; ++w) {
    pairs[w] = two_codes<Format::kE4M3>(low_half(words[w]) * by, high_half(words[w]) * by);
  }
  return make_uint2(pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16);
}

// A warp per row, which it reads once up to kKept packs a lane.
template <class Source>
__global__ void __launch_bounds__(kThreads) cast_rows_kernel(Source source, RowCodes out) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t num_packs = out.num_columns / kPack, step = static_cast<int64_t>(gridDim.x) * kWarps;
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32; row < out.num_rows; row += step) {
    source.begin(row);
    uint4 kept[kKept];
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
      const int64_t pack = lane + i * 32;
      if (pack >= num_packs) continue;
      kept[i] = source.load(pack);
      largest = larger_magnitudes(largest, kept[i]);
    }
    for (int64_t pack = lane + kKept * 32; pack < num_packs; pack += 32) {
      largest = larger_magnitudes(largest, source.load(pack));
    }
    source.finish(row, lane);
    const Scale scale = scale_of<Format::kE4M3>(largest_in_warp(larger_of_halves(largest)));
    if (lane == 0) out.scales[row] = scale.value;
    auto* codes = static_cast<uint2*>(out.codes) + row * num_packs;
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
      const int64_t pack = lane + i * 32;
      if (pack < num_packs) codes[pack] = codes_of(kept[i], scale.inverse);
    }
    for (int64_t pack = lane + kKept * 32; pack < num_packs; pack += 32) {
      codes[pack] = codes_of(source.load(pack), scale.inverse);
    }
  }
}

template <class Source>
void launch_rows(const Source& source, const RowCodes& out, cudaStream_t stream) {
  const int64_t numel = out.num_rows * out.num_columns;
  if (numel == 0) return;
  PS_CHECK(out.num_columns % kPack == 0, ArgumentError, "rows of ", out.num_columns,
           " elements are not made of packs of ", kPack);
  cast_rows_kernel<<<num_blocks(out.num_rows, kWarps), kThreads, 0, stream>>>(source, out);
  check_launch("fp8 cast_rows", numel);
}

// ---- Groups ------------------------------------------------------------------------------------------

// A tile of 128 rows of one group.
struct GroupTile {
  int64_t group;  // negative: after the last one
  int64_t row;    // first
  int64_t end;    // of the group's rows
  bool is_first;  // of the group
};

__device__ inline GroupTile group_tile(const Turn& args, int64_t tile) {
  const int64_t at = tile * kTile;
  int64_t low = 0, high = args.num_groups;  // the first group that ends after `at`
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (args.padded_ends[middle] > at) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  if (low == args.num_groups) return {-1, 0, 0, false};
  const int64_t begin = low == 0 ? 0 : args.ends[low - 1], padded = low == 0 ? 0 : args.padded_ends[low - 1];
  return {low, begin + at - padded, args.ends[low], at == padded};
}

__device__ inline uint32_t bfloat16_pair(uint32_t codes, float scale) {
  const __half2_raw halves = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(codes), __NV_E4M3);
  const uint32_t low = __float_as_uint(__half2float(__half(__half_raw{halves.x})) * scale);
  const uint32_t high = __float_as_uint(__half2float(__half(__half_raw{halves.y})) * scale);
  return low >> 16 | (high & 0xffff0000u);  // exact except for subnormal numbers
}

__device__ inline void load_group(const Turn& args, const GroupTile& place, int64_t column, Tile& tile) {
  const int64_t first = place.row + threadIdx.x / kPacks * kRows;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    uint4 pack = make_uint4(0, 0, 0, 0);
    if (first + i < place.end) {
      const int64_t source = args.sources == nullptr ? first + i : args.sources[first + i];
      const int64_t at = source * args.num_columns + column;
      if (args.scales == nullptr) {
        pack = __ldg(reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(args.x) + at));
      } else {
        const uint2 codes = __ldg(reinterpret_cast<const uint2*>(static_cast<const uint8_t*>(args.x) + at));
        const float scale = args.scales[source];
        pack = make_uint4(bfloat16_pair(codes.x & 0xffffu, scale), bfloat16_pair(codes.x >> 16, scale),
                          bfloat16_pair(codes.y & 0xffffu, scale), bfloat16_pair(codes.y >> 16, scale));
      }
    }
    tile.set_row(i, pack);
  }
}

__global__ void __launch_bounds__(kThreads) measure_groups_kernel(Turn args) {
  __shared__ uint32_t shared[kWarps * kTile / 2];
  const int64_t num_tile_columns = args.num_columns / kTile;
  const GroupTile place = group_tile(args, blockIdx.x / num_tile_columns);
  if (place.group < 0) return;
  const int64_t column = blockIdx.x % num_tile_columns * kTile + threadIdx.x % kPacks * kPack;
  Tile tile;
  load_group(args, place, column, tile);
  uint32_t columns[kPack];
  tile.largest_of_columns(shared, columns);
  if (threadIdx.x >= kPacks) return;
#pragma unroll
  for (int k = 0; k < kPack; ++k) atomicMax(args.largest + place.group * args.num_columns + column + k, columns[k]);
}

__global__ void __launch_bounds__(kThreads) turn_kernel(Turn args) {
  __shared__ uint2 turned[kTile * kPacks];
  const int64_t num_tile_columns = args.num_columns / kTile;
  const int64_t tile_row = blockIdx.x / num_tile_columns, tile_column = blockIdx.x % num_tile_columns;
  const GroupTile place = group_tile(args, tile_row);
  if (place.group < 0) return;
  const int64_t column = tile_column * kTile + threadIdx.x % kPacks * kPack;
  Tile tile;
  load_group(args, place, column, tile);
  Scale columns[kPack];
  const int64_t first = place.group * args.num_columns + column;
#pragma unroll
  for (int k = 0; k < kPack; ++k) columns[k] = scale_of<Format::kE4M3>(args.largest[first + k]);
  if (place.is_first && threadIdx.x < kPacks) {
#pragma unroll
    for (int k = 0; k < kPack; ++k) args.code_scales[first + k] = columns[k].value;
  }
  const int64_t stride = args.num_tiles * kTile;
  auto* out = static_cast<uint8_t*>(args.codes) + tile_column * kTile * stride + tile_row * kTile;
  write_transposed<Format::kE4M3>(tile, columns, turned, out, stride);
}

}  // namespace

void cast_rows(const void* x, const RowCodes& out, cudaStream_t stream) {
  launch_rows(Stored{x, out.num_columns}, out, stream);
}

void cast_swiglu(const void* gate_up, const RowCodes& out, cudaStream_t stream) {
  launch_rows(Gated{gate_up, out.num_columns}, out, stream);
}

void cast_swiglu_gradient(const void* gate_up, const void* grad_out, const RowCodes& out, cudaStream_t stream) {
  PS_CHECK(out.num_columns % (2 * kPack) == 0, ArgumentError, "gate and up of ", out.num_columns,
           " elements are not made of packs of ", kPack);
  launch_rows(GateGradient{gate_up, grad_out, out.num_columns / 2}, out, stream);
}

void cast_weighted(const WeightedRows& args, const RowCodes& out, cudaStream_t stream) {
  launch_rows(Weighted{args, out.num_columns}, out, stream);
}

void turn(const Turn& args, cudaStream_t stream) {
  const int64_t numel = args.num_tiles * kTile * args.num_columns;
  if (numel == 0 || args.num_groups == 0) return;
  PS_CHECK(args.num_columns % kTile == 0, ArgumentError, "rows of ", args.num_columns,
           " elements are not made of tiles of 128 x 128");
  const auto num_scales = static_cast<size_t>(args.num_groups * args.num_columns);
  PS_CUDA_CHECK(cudaMemsetAsync(args.largest, 0, num_scales * sizeof(uint32_t), stream));
  const auto num_tiles = static_cast<unsigned>(numel / (kTile * kTile));
  measure_groups_kernel<<<num_tiles, kThreads, 0, stream>>>(args);
  check_launch("fp8 measure_groups", numel);
  turn_kernel<<<num_tiles, kThreads, 0, stream>>>(args);
  check_launch("fp8 turn", numel);
}

}  // namespace patrickstar::fp8::cuda
