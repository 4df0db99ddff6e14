#include "bind/interrupts.h"

#include <utility>

namespace nb = nanobind;

namespace patrickstar::bind {

namespace {

bool is_waiting = false;  // guarded by the GIL

// Never destroyed: hooks may run while the interpreter ends.
nb::object& delivery() {
  static auto* function = new nb::object;
  return *function;
}

}  // namespace

void deliver_interrupt() {
  if (is_waiting) delivery()();
}

void register_interrupts(nb::module_& module) {
  module.def(
      "set_interrupt_delivery", [](nb::object function) { delivery() = std::move(function); }, nb::arg("function"),
      "Sets the function that module and gradient hooks call while an interrupt is waiting.");
  module.def("set_interrupt_waiting", [](bool waiting) { is_waiting = waiting; }, nb::arg("waiting"));
}

}  // namespace patrickstar::bind
