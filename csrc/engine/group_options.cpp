#include "engine/group_options.h"

#include <cmath>

namespace patrickstar {

namespace {

optim::StepScalars scalars_of(const AdamOptions& options, int64_t step_count, float grad_scale) {
  const auto step = static_cast<double>(step_count);
  const bool corrects = options.bias_correction == BiasCorrection::kApplied;
  const double bias_correction1 = corrects ? 1 - std::pow(options.beta1, step) : 1;
  const double bias_correction2 = corrects ? 1 - std::pow(options.beta2, step) : 1;
  const bool l2 = options.mode == WeightDecay::kL2;
  optim::AdamScalars scalars{};
  scalars.grad_scale = grad_scale;
  scalars.weight_decay = l2 ? static_cast<float>(options.weight_decay) : 0.0f;
  scalars.decay = l2 ? 1.0f : static_cast<float>(1 - options.lr * options.weight_decay);
  scalars.beta2 = static_cast<float>(options.beta2);
  scalars.one_minus_beta1 = static_cast<float>(1 - options.beta1);
  scalars.one_minus_beta2 = static_cast<float>(1 - options.beta2);
  scalars.inv_sqrt_bias_correction2 = static_cast<float>(1 / std::sqrt(bias_correction2));
  scalars.eps = static_cast<float>(options.eps);
  scalars.step_size = static_cast<float>(options.lr / bias_correction1);
  return scalars;
}

optim::StepScalars scalars_of(const LionOptions& options, int64_t /*step_count*/, float grad_scale) {
  optim::MomentumScalars scalars{};
  scalars.rule = optim::MomentumRule::kLion;
  scalars.grad_scale = grad_scale;
  scalars.decay = static_cast<float>(1 - options.lr * options.weight_decay);
  scalars.step_size = static_cast<float>(options.lr);
  scalars.one_minus_beta1 = static_cast<float>(1 - options.beta1);
  scalars.one_minus_beta2 = static_cast<float>(1 - options.beta2);
  return scalars;
}

optim::StepScalars scalars_of(const SgdOptions& options, int64_t step_count, float grad_scale) {
  optim::MomentumScalars scalars{};
  scalars.rule = options.mode == SgdMomentum::kNesterov ? optim::MomentumRule::kNesterov : optim::MomentumRule::kSgd;
  scalars.grad_scale = grad_scale;
  scalars.weight_decay = static_cast<float>(options.weight_decay);
  scalars.decay = 1.0f;
  scalars.step_size = static_cast<float>(options.lr);
  scalars.momentum_factor = static_cast<float>(options.momentum);
  // torch.optim.SGD does the same: the first momentum is the whole gradient.
  scalars.one_minus_dampening = step_count == 1 ? 1.0f : static_cast<float>(1 - options.dampening);
  return scalars;
}

}  // namespace

MatrixStep matrix_step_of(const GroupOptions& options) {
  const auto step_of = [](const auto& of_rule) -> MatrixStep {
    return {static_cast<float>(1 - of_rule.lr * of_rule.weight_decay), static_cast<float>(of_rule.lr)};
  };
  return std::visit(step_of, options);
}

optim::StepScalars scalars_of(const GroupOptions& options, int64_t step_count, float grad_scale) {
  return std::visit([&](const auto& of_rule) { return scalars_of(of_rule, step_count, grad_scale); }, options);
}

}  // namespace patrickstar
