// __torch_function__ of chunked parameters and their views; every operation on one passes through here, with the GIL.
//
// This finds the parameters of an operation and reports them to the UseObserver. Rare cases are in Python
// (module/chunked_parameter.py): classifying a function (once each), writes, and views.
//
// Functions that write a parameter are recognised by name and schema, and act on its float32 value. If another function
// writes the compute copy, PyTorch's version counter reveals it afterwards: the operation raises, and the copy is made
// again.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <vector>

#include "bind/use_observer.h"

namespace patrickstar::bind {

// How a function uses a parameter's memory.
enum class Way : uint8_t {
  kLook,      // metadata only
  kRead,      // reads it, and so does its backward
  kReadOnce,  // reads it; its backward needs the result's shape only
  kAlias,     // returns a tensor on the same memory that is not an autograd view
  kMayWrite,  // writes its first argument
};

class TorchFunction {
 public:
  // - `types`: classes whose instances have a handle, `_patrickstar`, and the address of their TensorImpl,
  //   `_patrickstar_impl`.
  // - `way_of(func)` returns a Way.
  // - `write(func, args, kwargs)` performs a write to a parameter; NotImplemented if the call writes none.
  // - `refuse(func, handle)` raises after an unrecognised write to the handle's parameter.
  // - `as_view(result, func, handles)` makes results on a chunk's memory report their uses.
  TorchFunction(const pybind11::tuple& types, pybind11::object way_of, pybind11::object write, pybind11::object refuse,
                pybind11::object as_view);

  pybind11::object operator()(pybind11::handle func, pybind11::handle types, pybind11::tuple args,
                              pybind11::handle kwargs) const;

 private:
  // A parameter, or a view of one, among an operation's arguments.
  struct Argument {
    pybind11::object handle;
    const void* impl;  // c10::TensorImpl
    uint32_t version;  // before the operation
  };
  using Arguments = std::vector<Argument>;

  void collect(pybind11::handle value, Arguments& arguments) const;
  pybind11::object read(Way way, const Arguments& arguments, pybind11::handle func, pybind11::handle types,
                        pybind11::handle args, pybind11::handle kwargs) const;

  std::vector<PyTypeObject*> types_;  // immortal, owned by the module
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
