// Update rules, and the hyperparameters of one parameter group in one step.
//
// Each rule is an alternative of GroupOptions. Options are compared with ==: a speculative update is valid only if the
// step has the options that the update was computed with. scalars_of() turns them into the kernels' scalars
// (optim/kernels.h), in float64, each rounded once. The layout (StateFormat) determines a rule's states and comes from
// the same configuration; keeps_variance() says which rules need a variance.
//
// All groups of an engine have the same rule. Plain values, usable from any thread.
#pragma once

#include <cstdint>
#include <variant>

#include "optim/compute.h"

namespace patrickstar {

enum class WeightDecay : uint8_t {
  kL2,         // Adam: the decay is added to the gradient
  kDecoupled,  // AdamW
};

enum class BiasCorrection : uint8_t {
  kApplied,  // momentum and variance are divided by 1 - beta^step, as torch.optim does
  kNone,     // momentum and variance are used without correction, so the first steps are smaller
};

struct AdamOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0;
  WeightDecay mode = WeightDecay::kDecoupled;
  BiasCorrection bias_correction = BiasCorrection::kApplied;

  friend bool operator==(const AdamOptions& a, const AdamOptions& b) {
    return a.lr == b.lr && a.beta1 == b.beta1 && a.beta2 == b.beta2 && a.eps == b.eps &&
           a.weight_decay == b.weight_decay && a.mode == b.mode && a.bias_correction == b.bias_correction;
  }
};

// Weight decay is decoupled.
struct LionOptions {
  double lr = 1e-4;
  double beta1 = 0.9;
  double beta2 = 0.99;
  double weight_decay = 0;

  friend bool operator==(const LionOptions& a, const LionOptions& b) {
    return a.lr == b.lr && a.beta1 == b.beta1 && a.beta2 == b.beta2 && a.weight_decay == b.weight_decay;
  }
};

enum class SgdMomentum : uint8_t {
  kHeavyBall,  // the update is the momentum
  kNesterov,   // the update is the gradient plus the momentum
};

// Weight decay is added to the gradient.
struct SgdOptions {
  double lr = 1e-3;
  double momentum = 0;
  double dampening = 0;  // at most 1
  double weight_decay = 0;
  SgdMomentum mode = SgdMomentum::kHeavyBall;

  friend bool operator==(const SgdOptions& a, const SgdOptions& b) {
    return a.lr == b.lr && a.momentum == b.momentum && a.dampening == b.dampening && a.weight_decay == b.weight_decay &&
           a.mode == b.mode;
  }
};

using GroupOptions = std::variant<AdamOptions, LionOptions, SgdOptions>;

inline bool keeps_variance(const GroupOptions& options) { return std::holds_alternative<AdamOptions>(options); }

// Scalars for a whole matrix, by any rule (optim/matrix_rule.h).
struct MatrixStep {
  float decay;
  float step_size;
};
MatrixStep matrix_step_of(const GroupOptions& options);

// Scalars of a parameter's `step_count`-th update (from 1). Gradients are multiplied by `grad_scale` first.
optim::StepScalars scalars_of(const GroupOptions& options, int64_t step_count, float grad_scale);

}  // namespace patrickstar
