// Data movement and elementwise work of a mixture of experts, between its grouped products. The CUDA part only.
//
// A routed row is one token's copy for one of its experts. Routed rows lie in the order of experts; positions[t, k] is
// the row of token t's k-th expert, negative where that expert belongs to another rank. Matrices are row-major and
// contiguous, of `dtype`; sums are binary32. Pointers are device pointers; calls enqueue on `stream` and return. The
// caller selects the device. A failed launch throws SystemError.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/dtype.h"

namespace patrickstar::experts::cuda {

// A bias of the expert of each row. No values: none.
struct ExpertBias {
  const void* values;      // [num_experts, columns of a row], of the dtype of rows, or null
  const int64_t* experts;  // [rows]; num_experts or more, of other ranks: the last expert here
  int64_t num_experts;
};

struct SumRows {
  const void* rows;          // [routed rows, width]
  const int64_t* positions;  // [num_tokens, num_chosen]
  const float* weights;      // [num_tokens, num_chosen], or null: 1
  ExpertBias bias;
  void* out;  // [num_tokens, width]
  DType dtype;
  DType product_dtype;  // products round to it before they are summed: dtype or binary32
  int64_t num_tokens;
  int num_chosen;
  int64_t width;
};

// out[t] = sum over k of weights[t, k] * (row + its expert's bias), row = rows[positions[t, k]], in the order of
// torch.sum on CUDA. The sum in brackets is binary32.
void sum_rows(const SumRows& args, cudaStream_t stream);

// Backward of sum_rows() with weights.
struct ScaleRows {
  const void* grad_out;   // [num_tokens, width]
  const void* rows;       // [num_rows, width]
  const int64_t* tokens;  // [num_rows]: token of each row
  const float* weights;   // [num_rows]
  ExpertBias bias;
  void* grad_rows;      // [num_rows, width]: weights[i] * grad_out[tokens[i]]
  float* grad_weights;  // [num_rows]: dot product of row i with its bias and grad_out[tokens[i]]
  DType dtype;
  int64_t num_rows;
  int64_t width;
};

void scale_rows(const ScaleRows& args, cudaStream_t stream);

// SwiGLU of gate and up projections that lie side by side: out = silu(gate) * up, silu(gate) rounded to dtype.
// `gate_up`: [num_rows, 2 * width], `out`: [num_rows, width].
void gate(const void* gate_up, void* out, DType dtype, int64_t num_rows, int64_t width, cudaStream_t stream);

// `grad_out`: [num_rows, width]. `grad_gate_up`: [num_rows, 2 * width].
void gate_backward(const void* gate_up, const void* grad_out, void* grad_gate_up, DType dtype, int64_t num_rows,
                   int64_t width, cudaStream_t stream);

// Backward of sum_rows() over second products of SwiGLU, rows[i] = out[i] * the weight of its expert. In binary32.
struct WeightedGate {
  const void* gate_up;   // [num_rows, 2 * width], as of gate()
  const void* grad_out;  // [num_rows, width]: gradient of out before weighting
  const float* weights;  // [num_rows]
  void* grad_gate_up;    // [num_rows, 2 * width]: gradient of gate_up after weighting
  void* weighted_out;    // [num_rows, width]: weights[i] * out[i]
  float* grad_weights;   // [num_rows]: dot product of out[i] and grad_out[i]
  DType dtype;
  int64_t num_rows;
  int64_t width;
};

void weighted_gate_backward(const WeightedGate& args, cudaStream_t stream);

// Rows of gpt-oss's gate. Columns alternate between gate and up.
struct ClampedRows {
  const void* gate_up;  // [num_rows, 2 * width]
  ExpertBias bias;      // [num_experts, 2 * width]
  float alpha;
  float limit;
  DType dtype;
  int64_t num_rows;
  int64_t width;
};

// out = (up + 1) * gate * logistic(alpha * gate), of gate_up + bias in binary32; gate is at most `limit`, up between
// -limit and limit. `out`: [num_rows, width].
void clamped_gate(const ClampedRows& args, void* out, cudaStream_t stream);

// `grad_out`: [num_rows, width]. `grad_gate_up`: [num_rows, 2 * width]; the bias' gradient is its sum over rows.
void clamped_gate_backward(const ClampedRows& args, const void* grad_out, void* grad_gate_up, cudaStream_t stream);

}  // namespace patrickstar::experts::cuda
