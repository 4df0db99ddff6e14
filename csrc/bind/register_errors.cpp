#include "bind/bind.h"
#include "common/check.h"

namespace py = pybind11;

namespace patrickstar::bind {

void register_errors(py::module_& module) {
  // pybind11 maps ArgumentError (std::invalid_argument) to ValueError.
  const auto& state_error = py::register_exception<StateError>(module, "StateError", PyExc_RuntimeError);
  py::register_exception<MemoryBudgetError>(module, "MemoryBudgetError", PyExc_RuntimeError);
  py::register_exception<SystemError>(module, "SystemError", PyExc_RuntimeError);
  py::register_exception<DiskError>(module, "DiskError", PyExc_RuntimeError);
  py::register_exception<RankMismatch>(module, "RankMismatch", state_error);
  py::register_exception<RankFailure>(module, "RankFailure", PyExc_RuntimeError);
}

}  // namespace patrickstar::bind
