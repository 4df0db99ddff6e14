// A matrix rule and a compute format written in Python, for tests and prototypes on the simulated device. Threads of
// the core call them and take the GIL, so no thread may wait for the core while it holds the GIL. Their allocations
// count as host memory; their exceptions become StateError.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>

#include "optim/compute_format.h"
#include "optim/matrix_rule.h"

namespace patrickstar::bind {

// function(rows, columns, direction, momentum, master), with addresses as in optim::Matrix.
std::shared_ptr<const optim::MatrixRule> make_matrix_rule(nanobind::callable function);
// function(shape, dtype, values), where `values` is an address.
std::shared_ptr<const optim::ComputeFormat> make_compute_format(nanobind::callable function);

}  // namespace patrickstar::bind
