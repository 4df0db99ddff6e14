#include <pybind11/stl.h>

#include <memory>
#include <utility>

#include "bind/bind.h"
#include "bind/torch_function.h"
#include "bind/use_observer.h"

namespace py = pybind11;

namespace patrickstar::bind {

void register_backward_entry(py::module_& module);  // defined in use_observer.cpp

namespace {

class PythonListener final : public UseListener {
 public:
  Tick open_scope(const std::vector<ParamId>& params, HoldUntil until) override {
    PYBIND11_OVERRIDE_PURE(Tick, UseListener, open_scope, params, until);
  }
  void close_scope() override { PYBIND11_OVERRIDE_PURE(void, UseListener, close_scope, ); }
  Tick tick() override { PYBIND11_OVERRIDE_PURE(Tick, UseListener, tick, ); }
  Tick touch(const std::vector<ParamId>& params) override { PYBIND11_OVERRIDE_PURE(Tick, UseListener, touch, params); }
  void enter_backward(Tick begin, Tick end, const std::vector<ParamId>& params) override {
    PYBIND11_OVERRIDE_PURE(void, UseListener, enter_backward, begin, end, params);
  }
};

void register_listener(py::module_& module) {
  py::enum_<HoldUntil>(module, "HoldUntil")
      .value("SCOPE_END", HoldUntil::kScopeEnd)
      .value("NEXT_EVENT", HoldUntil::kNextEvent);
  py::class_<UseListener, PythonListener>(module, "UseListener", "Receives parameter uses (engine/use_listener.h).")
      .def(py::init<>())
      .def("open_scope", &UseListener::open_scope, ReleaseGil())
      .def("close_scope", &UseListener::close_scope, ReleaseGil())
      .def("tick", &UseListener::tick, ReleaseGil())
      .def("touch", &UseListener::touch, ReleaseGil())
      .def("enter_backward", &UseListener::enter_backward, ReleaseGil());
}

void register_uses(py::module_& module) {
  py::class_<UseObserver, std::shared_ptr<UseObserver>>(
      module, "UseObserver", "Turns parameter uses into acquire and release (bind/use_observer.h).")
      .def(py::init<py::object, py::object>(), py::arg("listener"), py::arg("find_nodes"))
      .def("forget_scopes", &UseObserver::forget_scopes)
      .def("touch", &UseObserver::touch)
      .def_property_readonly("is_between_calls", &UseObserver::is_between_calls)
      .def("was_read", &UseObserver::was_read)
      .def("note_read", &UseObserver::note_read)
      .def("forget_reads", &UseObserver::forget_reads);
  py::enum_<Way>(module, "Way", "How a function uses a parameter's memory.")
      .value("LOOK", Way::kLook)
      .value("READ", Way::kRead)
      .value("READ_ONCE", Way::kReadOnce)
      .value("ALIAS", Way::kAlias)
      .value("MAY_WRITE", Way::kMayWrite);
  // A function, not an object with __call__, since Python calls functions faster.
  module.def(
      "torch_function",
      [](const py::tuple& types, py::object way_of, py::object write, py::object refuse, py::object as_view) {
        auto function = std::make_shared<TorchFunction>(types, std::move(way_of), std::move(write), std::move(refuse),
                                                        std::move(as_view));
        return py::cpp_function(
            [function](const py::handle& func, const py::handle& given, py::tuple args, const py::handle& kwargs) {
              return (*function)(func, given, std::move(args), kwargs);
            },
            py::arg("func"), py::arg("types"), py::arg("args") = py::tuple(), py::arg("kwargs") = py::none());
      },
      "Makes a __torch_function__ (bind/torch_function.h).", py::kw_only(), py::arg("types"), py::arg("way_of"),
      py::arg("write"), py::arg("refuse"), py::arg("as_view"));
  py::class_<ModuleHook>(module, "ModuleHook", "The forward hooks of one module (bind/use_observer.h).")
      .def(py::init<std::shared_ptr<UseObserver>, std::vector<ParamId>, HoldUntil>(), py::arg("observer") = py::none(),
           py::arg("params") = std::vector<ParamId>{}, py::arg("until") = HoldUntil::kScopeEnd)
      .def("before_forward", [](ModuleHook& self, const py::handle&, const py::handle&) { self.before_forward(); })
      .def("after_forward", [](ModuleHook& self, const py::handle&, const py::handle&,
                               const py::handle& output) { self.after_forward(output); })
      .def_property_readonly("params", &ModuleHook::params)
      .def_property_readonly("touched", &ModuleHook::touched)
      .def_property_readonly("until", &ModuleHook::until)
      .def("finish_learning", &ModuleHook::finish_learning)
      .def("__reduce__", [](const py::object& self) { return py::make_tuple(py::type::of(self), py::tuple()); });
}

}  // namespace

void register_observer(py::module_& module) {
  register_listener(module);
  register_backward_entry(module);
  register_uses(module);
}

}  // namespace patrickstar::bind
