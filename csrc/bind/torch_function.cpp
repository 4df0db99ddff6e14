#include "bind/torch_function.h"

#include <algorithm>
#include <utility>

#include "torch_api/attached_torch.h"

namespace py = pybind11;

namespace patrickstar::bind {

namespace {

struct EngineUse {
  UseObserver* observer;
  std::vector<ParamId> params;
  Tick begin = 0;
};

}  // namespace

TorchFunction::TorchFunction(const py::tuple& types, py::object way_of, py::object write, py::object refuse,
                             py::object as_view)
    : way_of_(std::move(way_of)), write_(std::move(write)), refuse_(std::move(refuse)), as_view_(std::move(as_view)) {
  for (const py::handle& type : types) types_.push_back(reinterpret_cast<PyTypeObject*>(type.ptr()));
  const py::module_ torch = py::module_::import("torch");
  call_plainly_ = torch.attr("_C").attr("_disabled_torch_function_impl");
  tensor_type_ = reinterpret_cast<PyTypeObject*>(torch.attr("Tensor").ptr());
}

py::object TorchFunction::operator()(py::handle func, py::handle types, py::tuple args, py::handle kwargs) const {
  const Way way = way_of_(func).cast<Way>();
  Arguments arguments;
  if (way != Way::kLook) {
    for (const py::handle& value : args) collect(value, arguments);
    if (!kwargs.is_none()) {
      for (const auto& item : kwargs.cast<py::dict>()) collect(item.second, arguments);
    }
  }
  if (arguments.empty()) return call_without_torch_function(call_plainly_, func, types, args, kwargs);
  if (way == Way::kMayWrite || (!kwargs.is_none() && kwargs.contains("out"))) {
    py::object written = write_(func, args, kwargs.is_none() ? py::dict() : py::reinterpret_borrow<py::dict>(kwargs));
    if (!written.is(py::handle(Py_NotImplemented))) return written;
  }
  return read(way, arguments, func, types, args, kwargs);
}

py::object TorchFunction::read(Way way, const Arguments& arguments, py::handle func, py::handle types, py::handle args,
                               py::handle kwargs) const {
  std::vector<EngineUse> uses;  // nearly always one
  for (const Argument& argument : arguments) {
    auto& observer = argument.handle.attr(uses_).cast<UseObserver&>();
    auto use =
        std::find_if(uses.begin(), uses.end(), [&](const EngineUse& other) { return other.observer == &observer; });
    if (use == uses.end()) use = uses.insert(uses.end(), EngineUse{&observer, {}});
    use->params.push_back(argument.handle.attr(id_).cast<ParamId>());
  }
  for (EngineUse& use : uses) use.begin = use.observer->begin_use(use.params);
  py::object result = call_without_torch_function(call_plainly_, func, types, args, kwargs);
  const BackwardNeed need = way == Way::kReadOnce ? BackwardNeed::kShape : BackwardNeed::kValue;
  for (const EngineUse& use : uses) use.observer->end_use(result, use.begin, use.params, need);
  for (const Argument& argument : arguments) {
    if (torch_api().version_of(argument.impl) != argument.version) refuse_(func, argument.handle);
  }
  const bool may_share = Py_TYPE(result.ptr()) != tensor_type_ || way == Way::kAlias ||
                         torch_api().is_inference_mode() || result.attr(is_view_)().cast<bool>();
  py::object given = result;
  if (may_share) {
    py::list known;
    for (const Argument& argument : arguments) known.append(argument.handle);
    given = as_view_(result, func, known);
  }
  if (given.is(result)) {  // no view: its values were read
    for (const EngineUse& use : uses) use.observer->note_read(use.params);
  }
  return given;
}

void TorchFunction::collect(py::handle value, Arguments& arguments) const {
  PyTypeObject* type = Py_TYPE(value.ptr());
  if (type == tensor_type_) return;
  if (std::any_of(types_.begin(), types_.end(), [type](PyTypeObject* t) { return PyType_IsSubtype(type, t) != 0; })) {
    const auto* impl = reinterpret_cast<const void*>(value.attr(impl_).cast<uintptr_t>());
    arguments.push_back({value.attr(handle_), impl, torch_api().version_of(impl)});
  } else if (PyList_Check(value.ptr()) != 0 || PyTuple_Check(value.ptr()) != 0) {
    for (const py::handle& item : value) collect(item, arguments);
  }
}

}  // namespace patrickstar::bind
