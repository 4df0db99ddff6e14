// The post-accumulate hook of one parameter: takes a gradient away from autograd and folds it into its chunk.
// Called by autograd with the GIL, which is released in the core.
//
// It refers to the runtime alone: the garbage collector does not see what a tensor's hooks refer to, and would never
// free an engine among it.
#pragma once

#include <pybind11/pybind11.h>

#include "bind/interned.h"
#include "engine/runtime.h"

namespace patrickstar::bind {

class GradientHook {
 public:
  // `runtime` is a Runtime. `take(param)` gives the gradient and leaves none behind. `strides` are the parameter's; a
  // sparse gradient, or one of other strides, is copied by `rearrange(gradient, param)`.
  GradientHook(pybind11::object runtime, ParamId param, pybind11::tuple strides, pybind11::object take,
               pybind11::object rearrange);

  void operator()(pybind11::handle param);

  ParamId param() const { return param_; }
  // Whether a gradient was ever folded.
  bool has_folded() const { return has_folded_; }

 private:
  pybind11::object keeper_;  // of the runtime
  Runtime& runtime_;
  ParamId param_;
  pybind11::tuple strides_;
  pybind11::object take_;
  pybind11::object rearrange_;
  bool has_folded_ = false;
  pybind11::object is_sparse_ = interned("is_sparse");
  pybind11::object stride_ = interned("stride");
  pybind11::object data_ptr_ = interned("data_ptr");
};

}  // namespace patrickstar::bind
