#include "optim/matrix_rule.h"

#include "optim/compute.h"

namespace patrickstar::optim {

namespace {

// Plain SGD with `scratch` as gradient and momentum; accepts any parameter dtype.
UpdateJob step_of(const AdamRange& range, const MatrixScalars& scalars) {
  UpdateJob job{};
  job.range = range;
  job.range.grad = scalars.scratch;
  job.range.grad_dtype = DType::kFloat32;
  job.range.momentum = scalars.scratch;
  MomentumScalars step{};
  step.rule = MomentumRule::kSgd;
  step.grad_scale = 1;
  step.decay = scalars.decay;
  step.step_size = scalars.step_size;
  step.one_minus_dampening = 1;
  job.scalars = step;
  return job;
}

}  // namespace

void update_matrix(Compute& compute, const AdamRange& range, const MatrixScalars& scalars) {
  compute.cast_to_float(range.grad, range.grad_dtype, scalars.scratch, range.numel);
  compute.scale(scalars.scratch, scalars.grad_scale, range.numel);
  scalars.rule->make_direction({scalars.rows, scalars.columns, scalars.scratch, static_cast<float*>(range.momentum),
                                static_cast<const float*>(range.master)});
  compute.update({step_of(range, scalars)});
}

}  // namespace patrickstar::optim
