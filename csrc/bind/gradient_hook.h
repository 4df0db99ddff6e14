// Post-accumulate hook of one parameter: moves its gradient from autograd to its chunk. Autograd calls it with the GIL;
// the core runs without.
//
// The hook references the runtime only. The garbage collector cannot see references held by a tensor's hooks, so one to
// the engine would never be freed.
#pragma once

#include <nanobind/nanobind.h>

#include "bind/interned.h"
#include "engine/runtime.h"

namespace patrickstar::bind {

class GradientHook {
 public:
  // `runtime`: a Runtime. `take(param)` removes and returns the gradient. `rearrange(gradient, param)` copies gradients
  // that are sparse or whose strides differ from `strides`.
  GradientHook(nanobind::object runtime, ParamId param, nanobind::tuple strides, nanobind::object take,
               nanobind::object rearrange);

  void operator()(nanobind::handle param);

  ParamId param() const { return param_; }
  // True once a gradient was accumulated.
  bool has_accumulated() const { return has_accumulated_; }

 private:
  nanobind::object keeper_;  // keeps runtime_ alive
  Runtime& runtime_;
  ParamId param_;
  nanobind::tuple strides_;
  nanobind::object take_;
  nanobind::object rearrange_;
  bool has_accumulated_ = false;
  nanobind::object is_sparse_ = interned("is_sparse");
  nanobind::object stride_ = interned("stride");
  nanobind::object data_ptr_ = interned("data_ptr");
};

}  // namespace patrickstar::bind
