// Post-accumulate hook of one parameter: moves its gradient from autograd to its chunk. Autograd calls it with the GIL;
// the core runs without.
//
// The hook references the runtime only. The garbage collector cannot see references held by a tensor's hooks, so one to
// the engine would never be freed.
#pragma once

#include <pybind11/pybind11.h>

#include "bind/interned.h"
#include "engine/runtime.h"

namespace patrickstar::bind {

class GradientHook {
 public:
  // `runtime`: a Runtime. `take(param)` removes and returns the gradient. `rearrange(gradient, param)` copies gradients
  // that are sparse or whose strides differ from `strides`.
  GradientHook(pybind11::object runtime, ParamId param, pybind11::tuple strides, pybind11::object take,
               pybind11::object rearrange);

  void operator()(pybind11::handle param);

  ParamId param() const { return param_; }
  // True once a gradient was accumulated.
  bool has_accumulated() const { return has_accumulated_; }

 private:
  pybind11::object keeper_;  // keeps runtime_ alive
  Runtime& runtime_;
  ParamId param_;
  pybind11::tuple strides_;
  pybind11::object take_;
  pybind11::object rearrange_;
  bool has_accumulated_ = false;
  pybind11::object is_sparse_ = interned("is_sparse");
  pybind11::object stride_ = interned("stride");
  pybind11::object data_ptr_ = interned("data_ptr");
};

}  // namespace patrickstar::bind
