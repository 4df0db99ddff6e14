// __torch_function__ of chunked parameters and their views; every operation on one passes through here, with the GIL.
//
// This finds the parameters of an operation and reports them to the UseObserver. Rare cases are in Python
// (module/chunked_parameter.py): classifying a function (once each), writes, and views.
//
// Functions that write a parameter are recognised by name and schema, and act on its float32 value. If another function
// writes the compute copy, PyTorch's version counter reveals it afterwards: the operation raises, and the copy is made
// again.
#pragma once

#include <nanobind/nanobind.h>

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
  TorchFunction(const nanobind::tuple& types, nanobind::object way_of, nanobind::object write, nanobind::object refuse,
                nanobind::object as_view);

  nanobind::object operator()(nanobind::handle func, nanobind::handle types, nanobind::tuple args,
                              nanobind::handle kwargs) const;

 private:
  // A parameter, or a view of one, among an operation's arguments.
  struct Argument {
    nanobind::object handle;
    const void* impl;  // c10::TensorImpl
    uint32_t version;  // before the operation
  };
  using Arguments = std::vector<Argument>;

  void collect(nanobind::handle value, Arguments& arguments) const;
  nanobind::object read(Way way, const Arguments& arguments, nanobind::handle func, nanobind::handle types,
                        nanobind::handle args, nanobind::handle kwargs) const;

  std::vector<PyTypeObject*> types_;  // immortal, owned by the module
  nanobind::object way_of_;
  nanobind::object write_;
  nanobind::object refuse_;
  nanobind::object as_view_;
  nanobind::object call_plainly_;  // torch._C._disabled_torch_function_impl
  PyTypeObject* tensor_type_;
  nanobind::object handle_ = interned("_patrickstar");
  nanobind::object impl_ = interned("_patrickstar_impl");
  nanobind::object id_ = interned("id");
  nanobind::object uses_ = interned("uses");
  nanobind::object is_view_ = interned("_is_view");
};

}  // namespace patrickstar::bind
