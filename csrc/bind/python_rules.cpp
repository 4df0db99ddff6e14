#include "bind/python_rules.h"

#include <nanobind/stl/vector.h>

#include <cstdint>
#include <utility>

#include "backend/device_meter.h"
#include "common/check.h"

namespace nb = nanobind;

namespace patrickstar::bind {

namespace {

uintptr_t address(const void* data) { return reinterpret_cast<uintptr_t>(data); }

// Callable from any thread, with or without the GIL.
class PythonFunction {
 public:
  explicit PythonFunction(nb::callable function) : function_(std::move(function)) {}
  ~PythonFunction() {
    const nb::gil_scoped_acquire acquire;
    function_ = {};
  }
  PythonFunction(const PythonFunction&) = delete;
  PythonFunction& operator=(const PythonFunction&) = delete;

  template <typename... Args>
  void operator()(const char* what, const Args&... args) const {
    const nb::gil_scoped_acquire acquire;
    const HostAllocationScope allocations;
    try {
      function_(args...);
    } catch (const nb::python_error& error) {
      throw StateError(detail::join(what, " raised ", error.what()));
    }
  }

 private:
  nb::callable function_;
};

class PythonMatrixRule final : public optim::MatrixRule {
 public:
  explicit PythonMatrixRule(nb::callable function) : function_(std::move(function)) {}
  void make_direction(const optim::Matrix& matrix) const override {
    function_("the rule of whole matrices", matrix.rows, matrix.columns, address(matrix.direction),
              address(matrix.momentum), address(matrix.master));
  }

 private:
  PythonFunction function_;
};

class PythonComputeFormat final : public optim::ComputeFormat {
 public:
  explicit PythonComputeFormat(nb::callable function) : function_(std::move(function)) {}
  void round(const std::vector<int64_t>& shape, DType dtype, void* values) const override {
    function_("the compute format", shape, dtype, address(values));
  }

 private:
  PythonFunction function_;
};

}  // namespace

std::shared_ptr<const optim::MatrixRule> make_matrix_rule(nb::callable function) {
  return std::make_shared<PythonMatrixRule>(std::move(function));
}

std::shared_ptr<const optim::ComputeFormat> make_compute_format(nb::callable function) {
  return std::make_shared<PythonComputeFormat>(std::move(function));
}

}  // namespace patrickstar::bind
