// The loss scale that keeps float16 gradients in range, and its reaction to overflows.
//
// Static (loss_scale > 0): constant. Dynamic (loss_scale == 0): the `hysteresis`-th overflow and each later one halve
// the scale. `scale_window` steps without overflow double it and restore the hysteresis. The rule is
// DynamicLossScaler.update_scale of DeepSpeed 0.19.8 (deepspeed/runtime/fp16/loss_scaler.py), with its names. DeepSpeed
// raises on an overflow at the minimum scale; here the caller decides by is_at_minimum().
//
//   LossScaler scaler({});                        // dynamic, 2**16
//   loss * scaler.scale(); ... gradients / scaler.scale();
//   scaler.update(overflow);                      // once per optimizer step, also a skipped one
//
// The engine owns it and calls it from one thread.
#pragma once

#include <cstdint>

namespace patrickstar::optim {

// Names and defaults of DeepSpeed's fp16 section.
struct LossScalerOptions {
  double loss_scale = 0;
  int initial_scale_power = 16;
  int64_t scale_window = 1000;  // steps
  double min_scale = 1;
  int64_t hysteresis = 2;  // overflows
  // True: every step without overflow restores the hysteresis. False: only a step that doubles the scale.
  bool consecutive_hysteresis = false;
};

// The state in a checkpoint.
struct LossScalerState {
  double scale = 1;
  int64_t iteration = 0;  // calls of update() so far
  int64_t last_overflow_iteration = -1;
  int64_t hysteresis_left = 1;
};

class LossScaler {
 public:
  static constexpr double kScaleFactor = 2;

  // Throws ArgumentError if an option is out of range.
  explicit LossScaler(const LossScalerOptions& options);

  double scale() const { return state_.scale; }
  bool is_dynamic() const { return options_.loss_scale == 0; }
  // True if the scale cannot be lowered further.
  bool is_at_minimum() const { return is_dynamic() && state_.scale <= options_.min_scale; }
  const LossScalerOptions& options() const { return options_; }
  const LossScalerState& state() const { return state_; }

  // `overflow`: some rank had a non-finite gradient in this step.
  void update(bool overflow);

  // Throws ArgumentError for a state that update() cannot reach. A static scale keeps the options' value.
  void set_state(const LossScalerState& state);

 private:
  LossScalerOptions options_;
  LossScalerState state_;
};

}  // namespace patrickstar::optim
