// The hyperparameters of one parameter group in one step.
#pragma once

#include <cstdint>

namespace patrickstar {

enum class WeightDecay : uint8_t {
  kL2,         // Adam: the decay is added to the gradient
  kDecoupled,  // AdamW
};

enum class BiasCorrection : uint8_t {
  kApplied,  // moments are divided by 1 - beta^step, as torch.optim does
  kNone,     // moments are taken as they are, so the first steps are smaller
};

struct GroupOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0;
  WeightDecay mode = WeightDecay::kDecoupled;
  BiasCorrection bias_correction = BiasCorrection::kApplied;

  friend bool operator==(const GroupOptions& a, const GroupOptions& b) {
    return a.lr == b.lr && a.beta1 == b.beta1 && a.beta2 == b.beta2 && a.eps == b.eps &&
           a.weight_decay == b.weight_decay && a.mode == b.mode && a.bias_correction == b.bias_correction;
  }
};

}  // namespace patrickstar
