// Update rules that need whole matrices, such as Muon's orthogonalised momentum. With g = float(grad) * grad_scale of
// all elements of one parameter:
//
//   d = make_direction(g, momentum, master)  the rule's function, which may change the momentum
//   p = fma(-step_size, d, p * decay)        step_size = lr, decay = 1 - lr * weight_decay
//   master = p;  param = round(p)
//
// All values are float32. One thread calls a rule once per step and parameter, with the same numbers wherever the
// states are. Results therefore do not depend on budget, chunk size or number of threads. The rule runs on the side of
// the update and must give the same bits on a CUDA device as on the host. Its constants are members; learning rate and
// weight decay come from the parameter group.
//
// Whole matrices are updated in one pass: never speculatively and never in pieces (suits_matrices(), plan/recipe.h).
// engine/matrix_updates.h selects their parameters.
#pragma once

#include <cstdint>

#include "optim/kernels.h"

namespace patrickstar::optim {

class Compute;

// Row-major, as the parameter in memory.
struct Matrix {
  int64_t rows;
  int64_t columns;
  float* direction;     // [rows, columns]; holds the gradient on entry
  float* momentum;      // [rows, columns]
  const float* master;  // [rows, columns]
};

class MatrixRule {
 public:
  virtual ~MatrixRule() = default;
  // Overwrites the gradient with the direction. On CUDA, enqueues this on the current stream.
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
  float* scratch;  // rows * columns elements, on the side of the update
};

// `range` covers the whole matrix, with a float32 master and momentum.
void update_matrix(Compute& compute, const AdamRange& range, const MatrixScalars& scalars);

}  // namespace patrickstar::optim
