// Converts Python keyword arguments to AdamScalars (optim/kernels.h).
#pragma once

#include <nanobind/nanobind.h>

#include <iterator>

#include "common/check.h"
#include "optim/kernels.h"

namespace patrickstar::bind {

struct ScalarField {
  const char* name;
  float optim::AdamScalars::* member;
};
inline constexpr ScalarField kScalarFields[] = {
    {"grad_scale", &optim::AdamScalars::grad_scale},
    {"weight_decay", &optim::AdamScalars::weight_decay},
    {"decay", &optim::AdamScalars::decay},
    {"beta2", &optim::AdamScalars::beta2},
    {"one_minus_beta1", &optim::AdamScalars::one_minus_beta1},
    {"one_minus_beta2", &optim::AdamScalars::one_minus_beta2},
    {"inv_sqrt_bias_correction2", &optim::AdamScalars::inv_sqrt_bias_correction2},
    {"eps", &optim::AdamScalars::eps},
    {"step_size", &optim::AdamScalars::step_size},
};

inline optim::AdamScalars scalars_of(const nanobind::kwargs& kwargs) {
  optim::AdamScalars scalars{};
  for (const ScalarField& field : kScalarFields) {
    PS_CHECK(kwargs.contains(field.name), ArgumentError, "adam got no ", field.name,
             "; pass all fields of AdamScalars");
    scalars.*field.member = nanobind::cast<float>(kwargs[field.name]);
  }
  PS_CHECK(kwargs.size() == std::size(kScalarFields), ArgumentError, "adam got ", kwargs.size(),
           " keyword arguments, it takes the ", std::size(kScalarFields), " fields of AdamScalars; remove the others");
  return scalars;
}

}  // namespace patrickstar::bind
