#include "bind/use_observer.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "bind/interrupts.h"
#include "torch_api/attached_torch.h"

namespace nb = nanobind;

namespace patrickstar::bind {

namespace {

// Pre-hook of an autograd node.
class BackwardEntry {
 public:
  BackwardEntry(nb::object keeper, UseListener& listener, Use use)
      : keeper_(std::move(keeper)), listener_(listener), use_(std::move(use)) {}

  void operator()(const nb::handle& /*gradient*/) const {
    deliver_interrupt();
    const nb::gil_scoped_release release;
    listener_.enter_backward(use_.begin, use_.end, use_.params);
  }

 private:
  nb::object keeper_;  // keeps listener_ alive
  UseListener& listener_;
  Use use_;
};

// Takes over a new reference; throws the Python error if null.
nb::object checked(PyObject* result) {
  if (result == nullptr) nb::raise_python_error();
  return nb::steal<nb::object>(result);
}

}  // namespace

nb::object call_without_torch_function(const nb::object& impl, nb::handle func, nb::handle types, nb::handle args,
                                       nb::handle kwargs) {
  PyObject* arguments[] = {func.ptr(), types.ptr(), args.ptr(), kwargs.ptr()};
  return checked(PyObject_Vectorcall(impl.ptr(), arguments, kwargs.is_none() ? 3 : 4, nullptr));
}

UseObserver::UseObserver(nb::object listener, nb::object find_nodes)
    : listener_(std::move(listener)), listens_(nb::cast<UseListener&>(listener_)), find_nodes_(std::move(find_nodes)) {
  const nb::module_ torch = nb::module_::import_("torch");
  tensor_type_ = torch.attr("Tensor");
  scratch_ = torch.attr("empty")(0, nb::arg("device") = "cpu", nb::arg("requires_grad") = true);
}

void UseObserver::open_scope(const void* caller, const std::vector<ParamId>& params, HoldUntil until) {
  Tick begin;
  {
    const nb::gil_scoped_release release;
    begin = listens_.open_scope(params, until);
  }
  scopes_.open({caller,
                begin,
                torch_api().is_grad_enabled(),
                until == HoldUntil::kScopeEnd ? params : std::vector<ParamId>{},
                {}});
}

std::optional<Scope> UseObserver::close_scope(const void* caller, nb::handle output) {
  std::optional<Scope> scope = scopes_.close(caller);
  if (!scope) return scope;
  if (!scope->uncovered.empty() && scope->grad_enabled && torch_api().is_grad_enabled())
    acquire_before(output, {scope->begin, listens_.tick(), scope->uncovered});
  const nb::gil_scoped_release release;
  listens_.close_scope();
  return scope;
}

bool UseObserver::was_read(ParamId param) const {
  const auto index = static_cast<size_t>(param);
  return index < read_.size() && read_[index] != 0;
}

void UseObserver::note_read(const std::vector<ParamId>& params) {
  if (!is_between_calls()) return;
  for (ParamId param : params) {
    const auto index = static_cast<size_t>(param);
    if (index >= read_.size()) read_.resize(index + 1, 0);
    read_[index] = 1;
  }
}

void UseObserver::touch(const std::vector<ParamId>& params) {
  const nb::gil_scoped_release release;
  listens_.touch(params);
}

Tick UseObserver::begin_use(const std::vector<ParamId>& params) {
  const nb::gil_scoped_release release;
  return listens_.touch(params);
}

void UseObserver::end_use(nb::handle result, Tick begin, const std::vector<ParamId>& params, BackwardNeed need) {
  if (scopes_.note_use(params) && need == BackwardNeed::kValue) acquire_before(result, {begin, begin, params});
}

nb::object UseObserver::node_of(nb::handle result) const {
  // F.linear returns a view of addmm's result. An in-place change gives the view another node, but its base keeps
  // addmm's.
  const nb::object base = result.attr(base_);
  const nb::object node = base.is_none() ? base : base.attr(grad_fn_);
  return node.is_none() ? nb::object(result.attr(grad_fn_)) : node;
}

void UseObserver::acquire_before(nb::handle result, Use use) {
  const bool is_tensor = Py_TYPE(result.ptr()) == reinterpret_cast<PyTypeObject*>(tensor_type_.ptr());
  const nb::object nodes = is_tensor ? node_of(result) : find_nodes_(result);
  if (nodes.is_none()) return;
  nb::dict hooks;
  hooks[hook_key_] = nb::cast(BackwardEntry(listener_, listens_, std::move(use)));
  scratch_.attr(backward_hooks_) = hooks;
  if (is_tensor) {
    checked(PyObject_CallMethodOneArg(nodes.ptr(), register_hook_dict_.ptr(), scratch_.ptr()));
  } else {
    for (const nb::handle& node : nodes) node.attr(register_hook_dict_)(scratch_);
  }
}

ModuleHook::ModuleHook(std::shared_ptr<UseObserver> observer, std::vector<ParamId> params, HoldUntil until)
    : observer_(std::move(observer)), params_(std::move(params)), until_(until) {}

void ModuleHook::before_forward() {
  if (!observer_) return;
  deliver_interrupt();
  observer_->open_scope(this, params_, until_);
}

void ModuleHook::after_forward(nb::handle output) {
  if (!observer_) return;
  const std::optional<Scope> scope = observer_->close_scope(this, output);
  if (!scope || stage_ == Stage::kLearned) return;
  std::vector<ParamId> all;
  std::set_union(touched_.begin(), touched_.end(), scope->touched.begin(), scope->touched.end(),
                 std::back_inserter(all));
  touched_ = std::move(all);
}

void ModuleHook::finish_learning(std::vector<ParamId> params) {
  params_ = std::move(params);
  stage_ = Stage::kLearned;
}

void register_backward_entry(nb::module_& module) {
  nb::class_<BackwardEntry>(module, "BackwardEntry", "A pre-hook of an autograd node (bind/use_observer.h).")
      .def("__call__", &BackwardEntry::operator(), nb::arg("gradient").none());
}

}  // namespace patrickstar::bind
