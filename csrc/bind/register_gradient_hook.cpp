#include "bind/bind.h"
#include "bind/gradient_hook.h"

namespace py = pybind11;

namespace patrickstar::bind {

void register_gradient_hook(py::module_& module) {
  py::class_<GradientHook>(module, "GradientHook", "A parameter's post-accumulate hook (bind/gradient_hook.h).")
      .def(py::init<py::object, ParamId, py::tuple, py::object, py::object>(), py::kw_only(), py::arg("runtime"),
           py::arg("param"), py::arg("strides"), py::arg("take"), py::arg("rearrange"))
      .def("__call__", &GradientHook::operator())
      .def_property_readonly("param", &GradientHook::param)
      .def_property_readonly("has_accumulated", &GradientHook::has_accumulated);
}

}  // namespace patrickstar::bind
