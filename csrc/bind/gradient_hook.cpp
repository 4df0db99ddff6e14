#include "bind/gradient_hook.h"

#include <cstdint>
#include <utility>

#include "bind/interrupts.h"

namespace nb = nanobind;

namespace patrickstar::bind {

GradientHook::GradientHook(nb::object runtime, ParamId param, nb::tuple strides, nb::object take, nb::object rearrange)
    : keeper_(std::move(runtime)),
      runtime_(nb::cast<Runtime&>(keeper_)),
      param_(param),
      strides_(std::move(strides)),
      take_(std::move(take)),
      rearrange_(std::move(rearrange)) {}

void GradientHook::operator()(nb::handle param) {
  deliver_interrupt();
  nb::object gradient = take_(param);
  if (gradient.is_none()) return;  // a user's autograd.Function returned no gradient
  const bool fits = !nb::cast<bool>(gradient.attr(is_sparse_)) && gradient.attr(stride_)().equal(strides_);
  if (!fits) gradient = rearrange_(gradient, param);
  const auto data = nb::cast<uintptr_t>(gradient.attr(data_ptr_)());
  {
    const nb::gil_scoped_release release;
    runtime_.accumulate_gradient(param_, reinterpret_cast<const void*>(data));
  }
  has_accumulated_ = true;
}

}  // namespace patrickstar::bind
