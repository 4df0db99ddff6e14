// __torch_function__ of chunked parameters and of views of them: every operation that gets one passes through here.
//
// Which parameters an operation gets is found here, and the observer told (bind/use_observer.h). What is rare is
// Python's (module/chunked_parameter.py): which way a function goes (asked once per function), writing, and views.
// Called with the GIL.
//
// Functions that write a parameter are known by their names and schemas, and carried out on its float32 value. Should
// another one write the compute copy, unannounced, PyTorch's version counter tells: the operation is refused then,
// after the fact, and the copy is derived anew.
#pragma once

#include <c10/core/TensorImpl.h>
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
  // `types`: the classes whose instances have a handle, as `_patrickstar`, and the address of their TensorImpl, as
  // `_patrickstar_impl`. `way_of(func)` gives a Way.
  // `write(func, args, kwargs)` carries out what writes a parameter, and gives NotImplemented for what does not.
  // `refuse(func, handle)` raises, for an operation that has written the handle's parameter unannounced.
  // `as_view(result, func, handles)` makes results that share a chunk's memory say when they are used.
  TorchFunction(const pybind11::tuple& types, pybind11::object way_of, pybind11::object write, pybind11::object refuse,
                pybind11::object as_view);

  pybind11::object operator()(pybind11::handle func, pybind11::handle types, pybind11::tuple args,
                              pybind11::handle kwargs) const;

 private:
  // A parameter, or a view of one, that an operation gets.
  struct Argument {
    pybind11::object handle;
    c10::TensorImpl* impl;
    uint32_t version;  // before the operation
  };
  using Arguments = std::vector<Argument>;

  void collect(pybind11::handle value, Arguments& arguments) const;
  pybind11::object read(Way way, const Arguments& arguments, pybind11::handle func, pybind11::handle types,
                        pybind11::handle args, pybind11::handle kwargs) const;

  std::vector<PyTypeObject*> types_;  // immortal: of the module that makes this
  pybind11::object way_of_;
  pybind11::object write_;
  pybind11::object refuse_;
  pybind11::object as_view_;
  pybind11::object call_plainly_;  // torch._C._disabled_torch_function_impl
  PyTypeObject* tensor_type_;
  pybind11::object handle_ = interned("_patrickstar");
  pybind11::object impl_ = interned("_patrickstar_impl");
  pybind11::object id_ = interned("id");
  pybind11::object uses_ = interned("uses");
  pybind11::object is_view_ = interned("_is_view");
};

}  // namespace patrickstar::bind
