// Casts of the rows of experts' tokens, and of experts' weights, to e4m3 codes. The CUDA part only.
//
// Scales are those of cuda_kernels.h, one for all elements that a product sums over. Rows lie by group, one group an
// expert. Products sum over columns, or over the rows of a group. Pointers are device pointers; calls enqueue on
// `stream` and return. The caller selects the device. A failed launch throws SystemError.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace patrickstar::fp8::cuda {

struct RowCodes {
  int64_t num_rows;
  int64_t num_columns;  // a multiple of 8
  void* codes;          // [num_rows, num_columns]
  float* scales;        // [num_rows]
};

// `x`: bfloat16 [num_rows, num_columns].
void cast_rows(const void* x, const RowCodes& out, cudaStream_t stream);

// SwiGLU of `gate_up`: bfloat16 [num_rows, 2 * num_columns], gate first.
void cast_swiglu(const void* gate_up, const RowCodes& out, cudaStream_t stream);

// Gradient of SwiGLU's argument. `gate_up`: bfloat16 [num_rows, num_columns], `grad_out`: half as many columns.
void cast_swiglu_gradient(const void* gate_up, const void* grad_out, const RowCodes& out, cudaStream_t stream);

// Backward of a weighted sum of rows: weights[i] * grad_out[tokens[i]].
struct WeightedRows {
  const void* grad_out;   // bfloat16 [any, num_columns]
  const void* rows;       // bfloat16 [num_rows, num_columns]
  const int64_t* tokens;  // [num_rows]
  const float* weights;   // [num_rows]
  float* grad_weights;    // [num_rows]: dot product of rows[i] and grad_out[tokens[i]]
};

void cast_weighted(const WeightedRows& args, const RowCodes& out, cudaStream_t stream);

// Rows of groups become columns of the codes, so that products sum over rows. Each group begins at a multiple of 128,
// and is filled up with zeros. Columns after the last group are not written.
struct Turn {
  const void* x;               // bfloat16, or codes [any, num_columns], row-major
  const float* scales;         // by row of x; null: x is bfloat16
  const int64_t* sources;      // by row of the groups: its index in x; null: the same
  const int32_t* ends;         // [num_groups]: end of the group's rows
  const int32_t* padded_ends;  // [num_groups]: end of the group's columns, multiples of 128, at least 128 apart
  int64_t num_groups;
  int64_t num_tiles;    // at least the last of padded_ends / 128
  int64_t num_columns;  // a multiple of 128
  void* codes;          // [num_columns, 128 * num_tiles]
  float* code_scales;   // [num_groups, num_columns]
  uint32_t* largest;    // memory: [num_groups, num_columns]
};

void turn(const Turn& args, cudaStream_t stream);

}  // namespace patrickstar::fp8::cuda
