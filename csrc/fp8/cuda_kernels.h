// Casts of bfloat16 matrices to 8-bit floating point with scales. The CUDA part only.
//
// A scale is a power of two: the least with which the largest magnitude of its block fits. Casts are then exact up to
// one rounding to nearest, and patrickstar/fp8/casting.py gives the same bits on the CPU. A block with an infinity or
// a NaN has the scale NaN; a block of zeros has 1. Pointers are device pointers; calls enqueue on `stream` and return.
// The caller selects the device. A failed launch throws SystemError.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace patrickstar::fp8::cuda {

constexpr int64_t kTile = 128;

// Elements that share a scale.
enum class Block : int {
  kStrip = 0,   // 128 along the dimension that a product sums over
  kSquare = 1,  // 128 x 128
  kLine = 2,    // a whole row of `codes`, a whole row of `transposed`
  kMatrix = 3,
};

enum class Format : int { kE4M3 = 0, kE5M2 = 1 };

// A null `codes` or `transposed` is left out, with its scales. Rows from `num_rows` on are zeros in the results.
struct Cast {
  const void* x;  // bfloat16 [num_rows, num_columns], row-major
  int64_t num_rows;
  int64_t padded_rows;  // a multiple of 128
  int64_t num_columns;  // a multiple of 128
  Block block;
  Format format;
  void* codes;               // [padded_rows, num_columns]
  float* scales;             // kStrip: [num_columns / 128, padded_rows]
                             // kSquare: [padded_rows / 128, num_columns / 128]; kLine: [padded_rows]; kMatrix: [1]
  void* transposed;          // [num_columns, padded_rows]
  float* transposed_scales;  // the same, of the transposed matrix
  uint32_t* largest;         // memory for kLine: [padded_rows + num_columns], and kMatrix: [1]
};

void cast(const Cast& args, cudaStream_t stream);

}  // namespace patrickstar::fp8::cuda
