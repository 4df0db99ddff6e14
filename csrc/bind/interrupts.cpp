#include "bind/interrupts.h"

#include <utility>

namespace py = pybind11;

namespace patrickstar::bind {

namespace {

bool is_waiting = false;  // guarded by the GIL

// Never destroyed: hooks may run while the interpreter ends.
py::object& delivery() {
  static auto* function = new py::object;
  return *function;
}

}  // namespace

void deliver_interrupt() {
  if (is_waiting) delivery()();
}

void register_interrupts(py::module_& module) {
  module.def(
      "set_interrupt_delivery", [](py::object function) { delivery() = std::move(function); }, py::arg("function"),
      "Sets the function that module and gradient hooks call while an interrupt is waiting.");
  module.def("set_interrupt_waiting", [](bool waiting) { is_waiting = waiting; }, py::arg("waiting"));
}

}  // namespace patrickstar::bind
