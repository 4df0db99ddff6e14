#include "bind/bind.h"
#include "optim/loss_scaler.h"

namespace nb = nanobind;

namespace patrickstar::bind {

namespace {

nb::dict describe_state(const optim::LossScaler& scaler) {
  const optim::LossScalerState& state = scaler.state();
  nb::dict result;
  result["scale"] = state.scale;
  result["iteration"] = state.iteration;
  result["last_overflow_iteration"] = state.last_overflow_iteration;
  result["hysteresis_left"] = state.hysteresis_left;
  return result;
}

}  // namespace

void register_loss_scaler(nb::module_& module) {
  using optim::LossScaler;
  const optim::LossScalerOptions defaults;
  nb::class_<LossScaler>(module, "LossScaler",
                         "Factor that keeps float16 gradients in range (optim/loss_scaler.h). loss_scale > 0: "
                         "constant; 0: dynamic, by DeepSpeed's rule. Raises ValueError for options out of range.")
      .def(
          "__init__",
          [](LossScaler* self, double loss_scale, int initial_scale_power, int64_t scale_window, double min_scale,
             int64_t hysteresis, bool consecutive_hysteresis) {
            new (self) LossScaler(
                {loss_scale, initial_scale_power, scale_window, min_scale, hysteresis, consecutive_hysteresis});
          },
          nb::kw_only(), nb::arg("loss_scale") = defaults.loss_scale,
          nb::arg("initial_scale_power") = defaults.initial_scale_power,
          nb::arg("scale_window") = defaults.scale_window, nb::arg("min_scale") = defaults.min_scale,
          nb::arg("hysteresis") = defaults.hysteresis,
          nb::arg("consecutive_hysteresis") = defaults.consecutive_hysteresis)
      .def_prop_ro("scale", &LossScaler::scale)
      .def_prop_ro("is_dynamic", &LossScaler::is_dynamic)
      .def_prop_ro("is_at_minimum", &LossScaler::is_at_minimum)
      .def("update", &LossScaler::update, nb::arg("overflow"), "Call once per optimizer step, skipped ones included.")
      .def("state", &describe_state, "The arguments of set_state(), as a dict of numbers.")
      .def(
          "set_state",
          [](LossScaler& self, double scale, int64_t iteration, int64_t last_overflow_iteration,
             int64_t hysteresis_left) { self.set_state({scale, iteration, last_overflow_iteration, hysteresis_left}); },
          nb::kw_only(), nb::arg("scale"), nb::arg("iteration"), nb::arg("last_overflow_iteration"),
          nb::arg("hysteresis_left"), "Restores state(). Raises ValueError for a state that no run can reach.");
}

}  // namespace patrickstar::bind
