#include <pybind11/stl.h>

#include "bind/bind.h"
#include "optim/loss_scaler.h"

namespace py = pybind11;

namespace patrickstar::bind {

namespace {

py::dict describe_state(const optim::LossScaler& scaler) {
  const optim::LossScalerState& state = scaler.state();
  py::dict result;
  result["scale"] = state.scale;
  result["iteration"] = state.iteration;
  result["last_overflow_iteration"] = state.last_overflow_iteration;
  result["hysteresis_left"] = state.hysteresis_left;
  return result;
}

}  // namespace

void register_loss_scaler(py::module_& module) {
  using optim::LossScaler;
  const optim::LossScalerOptions defaults;
  py::class_<LossScaler>(module, "LossScaler",
                         "Factor that keeps float16 gradients in range (optim/loss_scaler.h). loss_scale > 0: "
                         "constant; 0: dynamic, by DeepSpeed's rule. Raises ValueError for options out of range.")
      .def(py::init([](double loss_scale, int initial_scale_power, int64_t scale_window, double min_scale,
                       int64_t hysteresis, bool consecutive_hysteresis) {
             return LossScaler(
                 {loss_scale, initial_scale_power, scale_window, min_scale, hysteresis, consecutive_hysteresis});
           }),
           py::kw_only(), py::arg("loss_scale") = defaults.loss_scale,
           py::arg("initial_scale_power") = defaults.initial_scale_power,
           py::arg("scale_window") = defaults.scale_window, py::arg("min_scale") = defaults.min_scale,
           py::arg("hysteresis") = defaults.hysteresis,
           py::arg("consecutive_hysteresis") = defaults.consecutive_hysteresis)
      .def_property_readonly("scale", &LossScaler::scale)
      .def_property_readonly("is_dynamic", &LossScaler::is_dynamic)
      .def_property_readonly("is_at_minimum", &LossScaler::is_at_minimum)
      .def("update", &LossScaler::update, py::arg("overflow"), "Call once per optimizer step, skipped ones included.")
      .def("state", &describe_state, "The arguments of set_state(), as a dict of numbers.")
      .def(
          "set_state",
          [](LossScaler& self, double scale, int64_t iteration, int64_t last_overflow_iteration,
             int64_t hysteresis_left) { self.set_state({scale, iteration, last_overflow_iteration, hysteresis_left}); },
          py::kw_only(), py::arg("scale"), py::arg("iteration"), py::arg("last_overflow_iteration"),
          py::arg("hysteresis_left"), "Restores state(). Raises ValueError for a state that no run can reach.");
}

}  // namespace patrickstar::bind
