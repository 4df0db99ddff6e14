// A rule of whole matrices and a compute format that are functions of Python's, for tests and prototypes on the
// simulated device. They are called by threads of the core and take the interpreter for that, so while one runs no
// thread may wait for the core and hold the interpreter. What they allocate counts as host memory; what they raise
// becomes a StateError.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "optim/compute_format.h"
#include "optim/matrix_rule.h"

namespace patrickstar::bind {

// function(rows, columns, direction, momentum, master): addresses, as optim::Matrix has them.
std::shared_ptr<const optim::MatrixRule> make_matrix_rule(pybind11::function function);
// function(shape, dtype, values): an address.
std::shared_ptr<const optim::ComputeFormat> make_compute_format(pybind11::function function);

}  // namespace patrickstar::bind
