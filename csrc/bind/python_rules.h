// A rule of whole matrices that is a function of Python's, for tests and prototypes on the simulated device. It is
// called by threads of the core and takes the interpreter for that, so while it runs no thread may wait for the core and
// hold the interpreter. What it allocates counts as host memory; what it raises becomes a StateError.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "optim/matrix_rule.h"

namespace patrickstar::bind {

// function(rows, columns, direction, momentum, master): addresses, as optim::Matrix has them.
std::shared_ptr<const optim::MatrixRule> make_matrix_rule(pybind11::function function);

}  // namespace patrickstar::bind
