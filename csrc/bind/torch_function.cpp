#include "bind/torch_function.h"

#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <utility>

namespace py = pybind11;

namespace patrickstar::bind {

TorchFunction::TorchFunction(const py::tuple& types, py::object way_of, py::object write, py::object as_view)
    : way_of_(std::move(way_of)), write_(std::move(write)), as_view_(std::move(as_view)) {
  for (const py::handle& type : types) types_.push_back(reinterpret_cast<PyTypeObject*>(type.ptr()));
  const py::module_ torch = py::module_::import("torch");
  call_plainly_ = torch.attr("_C").attr("_disabled_torch_function_impl");
  tensor_type_ = reinterpret_cast<PyTypeObject*>(torch.attr("Tensor").ptr());
}

py::object TorchFunction::operator()(py::handle func, py::handle types, py::tuple args, py::handle kwargs) const {
  const Way way = way_of_(func).cast<Way>();
  Handles handles;
  if (way != Way::kLook) {
    for (const py::handle& value : args) collect(value, handles);
    if (!kwargs.is_none()) {
      for (const auto& item : kwargs.cast<py::dict>()) collect(item.second, handles);
    }
  }
  if (handles.empty()) return call_without_torch_function(call_plainly_, func, types, args, kwargs);
  if (way == Way::kMayWrite || (!kwargs.is_none() && kwargs.contains("out"))) {
    py::object written = write_(func, args, kwargs.is_none() ? py::dict() : py::reinterpret_borrow<py::dict>(kwargs));
    if (!written.is(py::handle(Py_NotImplemented))) return written;
  }
  return read(way, handles, func, types, args, kwargs);
}

py::object TorchFunction::read(Way way, const Handles& handles, py::handle func, py::handle types, py::handle args,
                               py::handle kwargs) const {
  std::vector<ParamId> params;
  for (const py::object& handle : handles) params.push_back(handle.attr(id_).cast<ParamId>());
  auto& observer = handles.front().attr(uses_).cast<UseObserver&>();
  const BackwardNeed need = way == Way::kReadOnce ? BackwardNeed::kShape : BackwardNeed::kValue;
  py::object result = observer.observe(params, need, func, types, args, kwargs);
  const bool may_share = Py_TYPE(result.ptr()) != tensor_type_ || way == Way::kAlias ||
                         c10::InferenceMode::is_enabled() || result.attr(is_view_)().cast<bool>();
  if (!may_share) return result;
  py::list known;
  for (const py::object& handle : handles) known.append(handle);
  return as_view_(result, func, known);
}

void TorchFunction::collect(py::handle value, Handles& handles) const {
  PyTypeObject* type = Py_TYPE(value.ptr());
  if (type == tensor_type_) return;
  if (std::any_of(types_.begin(), types_.end(), [type](PyTypeObject* t) { return PyType_IsSubtype(type, t) != 0; })) {
    handles.push_back(value.attr(handle_));
  } else if (PyList_Check(value.ptr()) != 0 || PyTuple_Check(value.ptr()) != 0) {
    for (const py::handle& item : value) collect(item, handles);
  }
}

}  // namespace patrickstar::bind
