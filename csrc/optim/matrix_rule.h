// Update rules that need whole matrices, such as one that orthogonalises a momentum.
//
// [Note: whole matrices] With g = float(grad) * grad_scale of all elements of one parameter:
//
//   d = direction(g, momentum, master)     the rule's, which may change the momentum
//   p = fma(-step_size, d, p * decay)      step_size = lr, decay = 1 - lr * weight_decay
//   master = p;  param = round(p)
//
// All is float32. A rule is asked once for each step and parameter, by one thread, and given the same numbers wherever
// the chunk's states are; so what it computes from them alone depends on no budget, chunk size or number of threads. It
// is asked on the side that makes the update: on a CUDA device it must give the bits that it gives on the host. Its own
// constants are members; learning rate and weight decay come from the parameter's group.
//
// Whole matrices are updated once, in one pass: neither ahead of the norm nor in pieces (suits_matrices(),
// plan/recipe.h). Which parameters they are is said in engine/matrix_updates.h.
#pragma once

#include <cstdint>

#include "optim/kernels.h"

namespace patrickstar::optim {

class Compute;

// Row after row, as the parameter lies in memory.
struct Matrix {
  int64_t rows;
  int64_t columns;
  float* direction;  // holds the gradient when the rule is asked
  float* momentum;
  const float* master;
};

class MatrixRule {
 public:
  virtual ~MatrixRule() = default;
  // Puts the direction where the gradient is. On a CUDA device it enqueues this on the current stream.
  virtual void make_direction(const Matrix& matrix) const = 0;
};

// Scalars of one matrix in one step.
struct MatrixScalars {
  const MatrixRule* rule;
  int64_t rows;
  int64_t columns;
  float grad_scale;
  float decay;
  float step_size;
  float* scratch;  // for rows * columns elements, on the side of the update
};

// `range` is all of the matrix, with a float32 master and momentum.
void update_matrix(Compute& compute, const AdamRange& range, const MatrixScalars& scalars);

}  // namespace patrickstar::optim
