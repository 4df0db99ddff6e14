#include "bind/bind.h"
#include "bind/gradient_hook.h"

namespace nb = nanobind;

namespace patrickstar::bind {

void register_gradient_hook(nb::module_& module) {
  nb::class_<GradientHook>(module, "GradientHook", "A parameter's post-accumulate hook (bind/gradient_hook.h).")
      .def(nb::init<nb::object, ParamId, nb::tuple, nb::object, nb::object>(), nb::kw_only(), nb::arg("runtime"),
           nb::arg("param"), nb::arg("strides"), nb::arg("take"), nb::arg("rearrange"))
      .def("__call__", &GradientHook::operator())
      .def_prop_ro("param", &GradientHook::param)
      .def_prop_ro("has_accumulated", &GradientHook::has_accumulated);
}

}  // namespace patrickstar::bind
