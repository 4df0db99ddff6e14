#include "optim/loss_scaler.h"

#include <algorithm>
#include <cmath>

#include "common/check.h"

namespace patrickstar::optim {

namespace {

// The scale multiplies a float32 loss.
constexpr int kMaxScalePower = 127;

void check_options(const LossScalerOptions& options) {
  PS_CHECK(std::isfinite(options.loss_scale) && options.loss_scale >= 0, ArgumentError, "loss_scale is ",
           options.loss_scale, ", it must be finite and at least 0; give a factor, or 0 for dynamic loss scaling");
  if (options.loss_scale > 0) return;
  PS_CHECK(options.initial_scale_power >= 0 && options.initial_scale_power <= kMaxScalePower, ArgumentError,
           "initial_scale_power is ", options.initial_scale_power, ", it must lie in 0 to ", kMaxScalePower,
           "; 16 is usual");
  PS_CHECK(options.scale_window >= 1, ArgumentError, "scale_window is ", options.scale_window,
           " steps, it must be at least 1; 1000 is usual");
  PS_CHECK(options.hysteresis >= 1, ArgumentError, "hysteresis is ", options.hysteresis,
           " overflows, it must be at least 1; 1 lowers the scale at each overflow");
  const double initial_scale = std::ldexp(1.0, options.initial_scale_power);
  PS_CHECK(options.min_scale > 0 && options.min_scale <= initial_scale, ArgumentError, "min_scale is ",
           options.min_scale, ", it must be above 0 and at most the initial scale ", initial_scale,
           "; lower it or raise initial_scale_power (", options.initial_scale_power, ")");
}

}  // namespace

LossScaler::LossScaler(const LossScalerOptions& options) : options_(options) {
  check_options(options);
  state_.scale = is_dynamic() ? std::ldexp(1.0, options.initial_scale_power) : options.loss_scale;
  state_.hysteresis_left = options.hysteresis;
}

void LossScaler::update(bool overflow) {
  if (!is_dynamic()) return;
  if (overflow) {
    if (options_.hysteresis == 1 || state_.hysteresis_left == 1) {
      state_.scale = std::max(state_.scale / kScaleFactor, options_.min_scale);
    } else {
      --state_.hysteresis_left;
    }
    state_.last_overflow_iteration = state_.iteration;
  } else {
    if (options_.consecutive_hysteresis) state_.hysteresis_left = options_.hysteresis;
    const int64_t stable_interval = state_.iteration - state_.last_overflow_iteration - 1;
    if (stable_interval > 0 && stable_interval % options_.scale_window == 0) {
      if (!options_.consecutive_hysteresis) state_.hysteresis_left = options_.hysteresis;
      state_.scale *= kScaleFactor;
    }
  }
  ++state_.iteration;
}

void LossScaler::set_state(const LossScalerState& state) {
  PS_CHECK(std::isfinite(state.scale) && state.scale > 0, ArgumentError, "the loss scaler's saved scale is ",
           state.scale, ", it must be finite and above 0; the checkpoint is damaged or not this class's");
  PS_CHECK(
      state.iteration >= 0 && state.last_overflow_iteration >= -1 && state.last_overflow_iteration < state.iteration,
      ArgumentError, "the loss scaler's saved last_overflow_iteration is ", state.last_overflow_iteration,
      ", it must lie in -1 to iteration - 1 (iteration is ", state.iteration,
      "); the checkpoint is damaged or not this class's");
  PS_CHECK(state.hysteresis_left >= 1, ArgumentError, "the loss scaler's saved hysteresis_left is ",
           state.hysteresis_left, ", it must be at least 1; the checkpoint is damaged or not this class's");
  state_ = state;
  if (!is_dynamic()) state_.scale = options_.loss_scale;
}

}  // namespace patrickstar::optim
