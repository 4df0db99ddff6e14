#include "bind/bind.h"
#include "common/check.h"

namespace nb = nanobind;

namespace patrickstar::bind {

void register_errors(nb::module_& module) {
  // nanobind maps ArgumentError (std::invalid_argument) to ValueError.
  const auto state_error = nb::exception<StateError>(module, "StateError", PyExc_RuntimeError);
  nb::exception<MemoryBudgetError>(module, "MemoryBudgetError", PyExc_RuntimeError);
  nb::exception<SystemError>(module, "SystemError", PyExc_RuntimeError);
  nb::exception<DiskError>(module, "DiskError", PyExc_RuntimeError);
  nb::exception<RankMismatch>(module, "RankMismatch", state_error);
  nb::exception<RankFailure>(module, "RankFailure", PyExc_RuntimeError);
}

}  // namespace patrickstar::bind
