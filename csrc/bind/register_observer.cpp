#include <nanobind/trampoline.h>

#include <memory>
#include <utility>

#include "bind/bind.h"
#include "bind/torch_function.h"
#include "bind/use_observer.h"

namespace nb = nanobind;

namespace patrickstar::bind {

void register_backward_entry(nb::module_& module);  // defined in use_observer.cpp

namespace {

class PythonListener final : public UseListener {
 public:
  NB_TRAMPOLINE(UseListener, 5);

  Tick open_scope(const std::vector<ParamId>& params, HoldUntil until) override {
    NB_OVERRIDE_PURE(open_scope, params, until);
  }
  void close_scope() override { NB_OVERRIDE_PURE(close_scope); }
  Tick tick() override { NB_OVERRIDE_PURE(tick); }
  Tick touch(const std::vector<ParamId>& params) override { NB_OVERRIDE_PURE(touch, params); }
  void enter_backward(Tick begin, Tick end, const std::vector<ParamId>& params) override {
    NB_OVERRIDE_PURE(enter_backward, begin, end, params);
  }
};

void register_listener(nb::module_& module) {
  nb::enum_<HoldUntil>(module, "HoldUntil")
      .value("SCOPE_END", HoldUntil::kScopeEnd)
      .value("NEXT_EVENT", HoldUntil::kNextEvent);
  nb::class_<UseListener, PythonListener>(module, "UseListener", "Receives parameter uses (engine/use_listener.h).")
      .def(nb::init<>())
      .def("open_scope", &UseListener::open_scope, ReleaseGil())
      .def("close_scope", &UseListener::close_scope, ReleaseGil())
      .def("tick", &UseListener::tick, ReleaseGil())
      .def("touch", &UseListener::touch, ReleaseGil())
      .def("enter_backward", &UseListener::enter_backward, ReleaseGil());
}

void register_uses(nb::module_& module) {
  nb::class_<UseObserver>(module, "UseObserver", "Turns parameter uses into acquire and release (bind/use_observer.h).")
      .def(nb::init<nb::object, nb::object>(), nb::arg("listener"), nb::arg("find_nodes"))
      .def("forget_scopes", &UseObserver::forget_scopes)
      .def("touch", &UseObserver::touch)
      .def_prop_ro("is_between_calls", &UseObserver::is_between_calls)
      .def("was_read", &UseObserver::was_read)
      .def("note_read", &UseObserver::note_read)
      .def("forget_reads", &UseObserver::forget_reads);
  nb::enum_<Way>(module, "Way", "How a function uses a parameter's memory.")
      .value("LOOK", Way::kLook)
      .value("READ", Way::kRead)
      .value("READ_ONCE", Way::kReadOnce)
      .value("ALIAS", Way::kAlias)
      .value("MAY_WRITE", Way::kMayWrite);
  // A function, not an object with __call__, since Python calls functions faster.
  module.def(
      "torch_function",
      [](const nb::tuple& types, nb::object way_of, nb::object write, nb::object refuse, nb::object as_view) {
        auto function = std::make_shared<TorchFunction>(types, std::move(way_of), std::move(write), std::move(refuse),
                                                        std::move(as_view));
        return nb::cpp_function(
            [function](const nb::handle& func, const nb::handle& given, nb::tuple args, const nb::handle& kwargs) {
              return (*function)(func, given, std::move(args), kwargs);
            },
            nb::arg("func"), nb::arg("types"), nb::arg("args") = nb::tuple(), nb::arg("kwargs") = nb::none());
      },
      "Makes a __torch_function__ (bind/torch_function.h).", nb::kw_only(), nb::arg("types"), nb::arg("way_of"),
      nb::arg("write"), nb::arg("refuse"), nb::arg("as_view"));
  nb::class_<ModuleHook>(module, "ModuleHook", "The forward hooks of one module (bind/use_observer.h).")
      .def(nb::init<std::shared_ptr<UseObserver>, std::vector<ParamId>, HoldUntil>(), nb::arg("observer") = nb::none(),
           nb::arg("params") = std::vector<ParamId>{}, nb::arg("until") = HoldUntil::kScopeEnd)
      .def(
          "before_forward", [](ModuleHook& self, const nb::handle&, const nb::handle&) { self.before_forward(); },
          nb::arg("module").none(), nb::arg("inputs").none())
      .def(
          "after_forward",
          [](ModuleHook& self, const nb::handle&, const nb::handle&, const nb::handle& output) {
            self.after_forward(output);
          },
          nb::arg("module").none(), nb::arg("inputs").none(), nb::arg("output").none())
      .def_prop_ro("params", &ModuleHook::params)
      .def_prop_ro("touched", &ModuleHook::touched)
      .def_prop_ro("until", &ModuleHook::until)
      .def("finish_learning", &ModuleHook::finish_learning)
      .def("__reduce__", [](const nb::object& self) { return nb::make_tuple(self.type(), nb::tuple()); });
}

}  // namespace

void register_observer(nb::module_& module) {
  register_listener(module);
  register_backward_entry(module);
  register_uses(module);
}

}  // namespace patrickstar::bind
