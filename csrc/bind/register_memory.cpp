#include <pybind11/stl.h>

#include <cstring>

#include "backend/device_meter.h"
#include "bind/bind.h"
#include "common/thread_pool.h"
#include "memory/host_arena.h"

namespace py = pybind11;

namespace patrickstar::bind {

namespace {

// with _C.HostAllocations(): what this thread allocates does not count as device memory of the simulated device.
class HostAllocations {
 public:
  void enter() { scope_ = std::make_unique<HostAllocationScope>(); }
  void exit(const py::object&, const py::object&, const py::object&) { scope_.reset(); }

 private:
  std::unique_ptr<HostAllocationScope> scope_;
};

// Preparation as on CUDA, without its pinning.
RegionHooks touching_hooks() {
  return {[](void* data, int64_t num_bytes) { std::memset(data, 0, static_cast<size_t>(num_bytes)); }, {}};
}

}  // namespace

void register_memory(py::module_& module) {
  module.def("num_available_cpus", &num_available_cpus, "Processors this process may run on.");
  py::class_<HostAllocations>(module, "HostAllocations",
                              "Context: CPU tensors made here are host memory, not memory of the simulated device.")
      .def(py::init<>())
      .def("__enter__", &HostAllocations::enter)
      .def("__exit__", &HostAllocations::exit);
  // For tests: addresses as integers.
  py::class_<HostArena>(module, "HostArena", "Host memory for payloads (memory/host_arena.h).")
      .def(py::init([](int64_t limit_bytes, bool prepares) {
             return std::make_unique<HostArena>(limit_bytes, prepares ? touching_hooks() : RegionHooks{});
           }),
           py::arg("limit_bytes"), py::arg("prepares") = false)
      .def("reserve", &HostArena::reserve)
      .def("prepare_ahead", &HostArena::prepare_ahead)
      .def("release_reserved", &HostArena::release_reserved)
      .def("allocate", [](HostArena& self,
                          int64_t num_bytes) { return reinterpret_cast<uintptr_t>(self.allocate(num_bytes).data); })
      .def("free", [](HostArena& self, uintptr_t data,
                      int64_t num_bytes) { self.free({reinterpret_cast<void*>(data), num_bytes, false}); })
      .def("trim", &HostArena::trim)
      .def("allocate_prepared",
           [](HostArena& self, int64_t num_bytes) {
             return reinterpret_cast<uintptr_t>(self.try_allocate_prepared(num_bytes).data);
           })
      .def_property_readonly("unreserved_bytes", &HostArena::unreserved_bytes)
      .def_property_readonly("used_bytes", &HostArena::used_bytes)
      .def_property_readonly("mapped_bytes", &HostArena::mapped_bytes)
      .def_property_readonly("peak_mapped_bytes", &HostArena::peak_mapped_bytes);
}

}  // namespace patrickstar::bind
