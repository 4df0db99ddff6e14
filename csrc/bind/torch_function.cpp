#include "bind/torch_function.h"

#include <algorithm>
#include <utility>

#include "torch_api/attached_torch.h"

namespace nb = nanobind;

namespace patrickstar::bind {

namespace {

struct EngineUse {
  UseObserver* observer;
  std::vector<ParamId> params;
  Tick begin = 0;
};

}  // namespace

TorchFunction::TorchFunction(const nb::tuple& types, nb::object way_of, nb::object write, nb::object refuse,
                             nb::object as_view)
    : way_of_(std::move(way_of)), write_(std::move(write)), refuse_(std::move(refuse)), as_view_(std::move(as_view)) {
  for (const nb::handle& type : types) types_.push_back(reinterpret_cast<PyTypeObject*>(type.ptr()));
  const nb::module_ torch = nb::module_::import_("torch");
  call_plainly_ = torch.attr("_C").attr("_disabled_torch_function_impl");
  tensor_type_ = reinterpret_cast<PyTypeObject*>(torch.attr("Tensor").ptr());
}

nb::object TorchFunction::operator()(nb::handle func, nb::handle types, nb::tuple args, nb::handle kwargs) const {
  const Way way = nb::cast<Way>(way_of_(func));
  Arguments arguments;
  if (way != Way::kLook) {
    for (const nb::handle& value : args) collect(value, arguments);
    if (!kwargs.is_none()) {
      for (const auto& item : nb::cast<nb::dict>(kwargs)) collect(item.second, arguments);
    }
  }
  if (arguments.empty()) return call_without_torch_function(call_plainly_, func, types, args, kwargs);
  if (way == Way::kMayWrite || (!kwargs.is_none() && nb::cast<nb::dict>(kwargs).contains("out"))) {
    nb::object written = write_(func, args, kwargs.is_none() ? nb::dict() : nb::borrow<nb::dict>(kwargs));
    if (!written.is(nb::handle(Py_NotImplemented))) return written;
  }
  return read(way, arguments, func, types, args, kwargs);
}

nb::object TorchFunction::read(Way way, const Arguments& arguments, nb::handle func, nb::handle types, nb::handle args,
                               nb::handle kwargs) const {
  std::vector<EngineUse> uses;  // nearly always one
  for (const Argument& argument : arguments) {
    auto& observer = nb::cast<UseObserver&>(argument.handle.attr(uses_));
    auto use =
        std::find_if(uses.begin(), uses.end(), [&](const EngineUse& other) { return other.observer == &observer; });
    if (use == uses.end()) use = uses.insert(uses.end(), EngineUse{&observer, {}});
    use->params.push_back(nb::cast<ParamId>(argument.handle.attr(id_)));
  }
  for (EngineUse& use : uses) use.begin = use.observer->begin_use(use.params);
  nb::object result = call_without_torch_function(call_plainly_, func, types, args, kwargs);
  const BackwardNeed need = way == Way::kReadOnce ? BackwardNeed::kShape : BackwardNeed::kValue;
  for (const EngineUse& use : uses) use.observer->end_use(result, use.begin, use.params, need);
  for (const Argument& argument : arguments) {
    if (torch_api().version_of(argument.impl) != argument.version) refuse_(func, argument.handle);
  }
  const bool may_share = Py_TYPE(result.ptr()) != tensor_type_ || way == Way::kAlias ||
                         torch_api().is_inference_mode() || nb::cast<bool>(result.attr(is_view_)());
  nb::object given = result;
  if (may_share) {
    nb::list known;
    for (const Argument& argument : arguments) known.append(argument.handle);
    given = as_view_(result, func, known);
  }
  if (given.is(result)) {  // no view: its values were read
    for (const EngineUse& use : uses) use.observer->note_read(use.params);
  }
  return given;
}

void TorchFunction::collect(nb::handle value, Arguments& arguments) const {
  PyTypeObject* type = Py_TYPE(value.ptr());
  if (type == tensor_type_) return;
  if (std::any_of(types_.begin(), types_.end(), [type](PyTypeObject* t) { return PyType_IsSubtype(type, t) != 0; })) {
    const auto* impl = reinterpret_cast<const void*>(nb::cast<uintptr_t>(value.attr(impl_)));
    arguments.push_back({value.attr(handle_), impl, torch_api().version_of(impl)});
  } else if (PyList_Check(value.ptr()) != 0 || PyTuple_Check(value.ptr()) != 0) {
    for (const nb::handle& item : value) collect(item, arguments);
  }
}

}  // namespace patrickstar::bind
