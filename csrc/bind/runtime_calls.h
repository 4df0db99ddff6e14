// Builds methods of Python's Runtime from a call's rule and a function of the open engine or a part of it. Each method
// takes the device's lock and runs without the GIL; arguments and results are copied.
//
//   .def("activation_bytes", bound<Call::kInspect>(+[](OpenEngine& open) { return open.backend().activation_bytes();
//   })) .def("is_offloaded", bound<Call::kInspect>(&OpenEngine::offload_store, &OffloadStore::is_over))
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <type_traits>
#include <utility>

#include "engine/runtime.h"

namespace patrickstar::bind {

// Closes the runtime without the GIL, if still open.
struct DeleteWithoutGil {
  void operator()(Runtime* runtime) const {
    const pybind11::gil_scoped_release release;
    delete runtime;
  }
};
using RuntimeHolder = std::unique_ptr<Runtime, DeleteWithoutGil>;
using RuntimeClass = pybind11::class_<Runtime, UseListener, RuntimeHolder>;

void register_runtime_values(RuntimeClass& runtime);

// Runs `work(open)` without the GIL.
template <Call call, typename Work>
auto without_gil(Runtime& self, const Work& work) -> std::decay_t<decltype(work(std::declval<OpenEngine&>()))> {
  const pybind11::gil_scoped_release release;
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
    const pybind11::gil_scoped_release release;
    const Runtime::Entry open = self.enter(call, param);
    return function(*open, param, std::move(args)...);
  };
}

// The same for a call on its first argument, a chunk.
template <Call call, typename Result>
auto bound_to_chunk(Result (*function)(OpenEngine&, ChunkId)) {
  return [function](Runtime& self, ChunkId chunk) -> std::decay_t<Result> {
    const pybind11::gil_scoped_release release;
    const Runtime::Entry open = self.enter(call, CallChunks::of(chunk));
    return function(*open, chunk);
  };
}

}  // namespace patrickstar::bind
