// __torch_function__ of chunked parameters and of views of them: every operation that gets one passes through here.
//
// Which parameters an operation gets is found here, and the observer told (bind/use_observer.h). What is rare is
// Python's (patrickstar/chunked_parameter.py): which way a function goes (asked once per function), writing, and views.
// Called with the GIL.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <vector>

#include "bind/use_observer.h"

namespace patrickstar::bind {

// What a function does with a parameter's memory.
enum class Way : uint8_t {
  kLook,      // nothing: it looks at metadata
  kRead,      // reads it, and so does its backward
  kReadOnce,  // reads it; its backward needs the result's shape only
  kAlias,     // gives a tensor with the same memory that is no view in autograd's sense
  kMayWrite,  // writes its first argument
};

class TorchFunction {
 public:
  // `types`: the classes whose instances have a handle, as `_patrickstar`. `way_of(func)` gives a Way.
  // `write(func, args, kwargs)` carries out what writes a parameter, and gives NotImplemented for what does not.
  // `as_view(result, func, handles)` makes results that share a chunk's memory say when they are used.
  TorchFunction(const pybind11::tuple& types, pybind11::object way_of, pybind11::object write,
                pybind11::object as_view);

  pybind11::object operator()(pybind11::handle func, pybind11::handle types, pybind11::tuple args,
                              pybind11::handle kwargs) const;

 private:
  using Handles = std::vector<pybind11::object>;

  void collect(pybind11::handle value, Handles& handles) const;
  pybind11::object read(Way way, const Handles& handles, pybind11::handle func, pybind11::handle types,
                        pybind11::handle args, pybind11::handle kwargs) const;

  std::vector<PyTypeObject*> types_;  // immortal: of the module that makes this
  pybind11::object way_of_;
  pybind11::object write_;
  pybind11::object as_view_;
  pybind11::object call_plainly_;  // torch._C._disabled_torch_function_impl
  PyTypeObject* tensor_type_;
  pybind11::object handle_ = interned("_patrickstar");
  pybind11::object id_ = interned("id");
  pybind11::object uses_ = interned("uses");
  pybind11::object is_view_ = interned("_is_view");
};

}  // namespace patrickstar::bind
