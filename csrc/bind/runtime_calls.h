// Builds methods of Python's Runtime from a call's rule and a function of the open engine or a part of it. Each method
// takes the device's lock and runs without the GIL; arguments and results are copied.
//
//   .def("activation_bytes", bound<Call::kInspect>(+[](OpenEngine& open) { return open.backend().activation_bytes();
//   })) .def("is_offloaded", bound<Call::kInspect>(&OpenEngine::offload_store, &OffloadStore::is_over))
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <type_traits>
#include <utility>

#include "engine/runtime.h"

namespace patrickstar::bind {

// Python's Runtime: its destructor closes it without the GIL, if still open.
class ClosedWithoutGil final : public Runtime {
 public:
  using Runtime::Runtime;
  ~ClosedWithoutGil() override {
    const nanobind::gil_scoped_release release;
    abandon();
  }
};
using RuntimeClass = nanobind::class_<Runtime, UseListener, ClosedWithoutGil>;

void register_runtime_values(RuntimeClass& runtime);

// Runs `work(open)` without the GIL.
template <Call call, typename Work>
auto without_gil(Runtime& self, const Work& work) -> std::decay_t<decltype(work(std::declval<OpenEngine&>()))> {
  const nanobind::gil_scoped_release release;
  const Runtime::Entry open = self.enter(call);
  return work(*open);
}

template <Call call, typename Result, typename... Args>
auto bound(Result (*function)(OpenEngine&, Args...)) {
  return [function](Runtime& self, Args... args) -> std::decay_t<Result> {
    return without_gil<call>(
        self, [&](OpenEngine& open) -> std::decay_t<Result> { return function(open, std::move(args)...); });
  };
}

template <Call call, typename Part, typename Result, typename... Args>
auto bound(Part OpenEngine::* part, Result (Part::*method)(Args...)) {
  return [part, method](Runtime& self, Args... args) -> std::decay_t<Result> {
    return without_gil<call>(self, [&](OpenEngine& open) -> std::decay_t<Result> {
      return (open.*part.*method)(std::forward<Args>(args)...);
    });
  };
}

template <Call call, typename Part, typename Result, typename... Args>
auto bound(Part OpenEngine::* part, Result (Part::*method)(Args...) const) {
  return [part, method](Runtime& self, Args... args) -> std::decay_t<Result> {
    return without_gil<call>(self, [&](OpenEngine& open) -> std::decay_t<Result> {
      return (open.*part.*method)(std::forward<Args>(args)...);
    });
  };
}

// The same for a call on the chunk of its first argument, a parameter.
template <Call call, typename Result, typename... Args>
auto bound_to_param(Result (*function)(OpenEngine&, ParamId, Args...)) {
  return [function](Runtime& self, ParamId param, Args... args) -> std::decay_t<Result> {
    const nanobind::gil_scoped_release release;
    const Runtime::Entry open = self.enter(call, param);
    return function(*open, param, std::move(args)...);
  };
}

// The same for a call on its first argument, a chunk.
template <Call call, typename Result>
auto bound_to_chunk(Result (*function)(OpenEngine&, ChunkId)) {
  return [function](Runtime& self, ChunkId chunk) -> std::decay_t<Result> {
    const nanobind::gil_scoped_release release;
    const Runtime::Entry open = self.enter(call, CallChunks::of(chunk));
    return function(*open, chunk);
  };
}

}  // namespace patrickstar::bind
