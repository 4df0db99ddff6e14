// The factor that keeps float16 gradients in range, and the rule by which it follows overflows.
//
// Static (loss_scale > 0): the factor never changes. Dynamic (loss_scale == 0): the `hysteresis`-th overflow and
// each one after it halve the factor; `scale_window` steps without overflow double it and restore the
// hysteresis. The rule is DynamicLossScaler.update_scale of DeepSpeed 0.19.8 (deepspeed/runtime/fp16/loss_scaler.py),
// with its names; where that raises, when an overflow finds the factor at its minimum, is_at_minimum() here lets the
// caller decide.
//
//   LossScaler scaler({});                        // dynamic, 2**16
//   loss * scaler.scale(); ... gradients / scaler.scale();
//   scaler.update(overflow);                      // once per optimizer step, also a skipped one
//
// The engine owns it and calls it from one thread.
#pragma once

#include <cstdint>

namespace patrickstar::optim {

// Field names follow DeepSpeed's fp16 section; defaults are its defaults.
struct LossScalerOptions {
  double loss_scale = 0;
  int initial_scale_power = 16;
  int64_t scale_window = 1000;  // steps
  double min_scale = 1;
  int64_t hysteresis = 2;  // overflows
  // Whether each step without overflow restores the hysteresis, rather than only one that doubles the scale.
  bool consecutive_hysteresis = false;
};

// What a checkpoint keeps.
struct LossScalerState {
  double scale = 1;
  int64_t iteration = 0;  // calls of update() so far
  int64_t last_overflow_iteration = -1;
  int64_t hysteresis_left = 1;
};

class LossScaler {
 public:
  static constexpr double kScaleFactor = 2;

  // Throws ArgumentError when an option is out of its range.
  explicit LossScaler(const LossScalerOptions& options);

  double scale() const { return state_.scale; }
  bool is_dynamic() const { return options_.loss_scale == 0; }
  // An overflow that would lower the scale finds it as low as it may go.
  bool is_at_minimum() const { return is_dynamic() && state_.scale <= options_.min_scale; }
  const LossScalerOptions& options() const { return options_; }
  const LossScalerState& state() const { return state_; }

  // `overflow`: this step's gradients were not all finite on some rank.
  void update(bool overflow);

  // Throws ArgumentError when the state is none that update() can lead to. A static scale stays what the
  // options say.
  void set_state(const LossScalerState& state);

 private:
  LossScalerOptions options_;
  LossScalerState state_;
};

}  // namespace patrickstar::optim
