#include "bind/gradient_hook.h"

#include <cstdint>
#include <utility>

#include "bind/interrupts.h"

namespace py = pybind11;

namespace patrickstar::bind {

GradientHook::GradientHook(py::object runtime, ParamId param, py::tuple strides, py::object take, py::object rearrange)
    : keeper_(std::move(runtime)),
      runtime_(keeper_.cast<Runtime&>()),
      param_(param),
      strides_(std::move(strides)),
      take_(std::move(take)),
      rearrange_(std::move(rearrange)) {}

void GradientHook::operator()(py::handle param) {
  deliver_interrupt();
  py::object gradient = take_(param);
  if (gradient.is_none()) return;  // a user's autograd.Function returned no gradient
  const bool fits = !gradient.attr(is_sparse_).cast<bool>() && gradient.attr(stride_)().equal(strides_);
  if (!fits) gradient = rearrange_(gradient, param);
  const auto data = gradient.attr(data_ptr_)().cast<uintptr_t>();
  {
    const py::gil_scoped_release release;
    runtime_.accumulate_gradient(param_, reinterpret_cast<const void*>(data));
  }
  has_accumulated_ = true;
}

}  // namespace patrickstar::bind
