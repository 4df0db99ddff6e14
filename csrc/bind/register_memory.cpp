#include <pybind11/stl.h>

#include <atomic>
#include <cstring>
#include <memory>

#include "backend/device_meter.h"
#include "bind/bind.h"
#include "common/check.h"
#include "memory/host_arena.h"
#include "memory/interleave.h"

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

// As on CUDA, without its pinning; the first `num_failures` regions cannot be prepared.
RegionHooks region_hooks(bool prepares, int num_failures, const std::vector<int>& nodes) {
  RegionHooks hooks;
  if (!nodes.empty()) {
    hooks.place = [nodes](void* data, int64_t num_bytes) { interleave_pages(data, num_bytes, nodes); };
  }
  if (prepares) {
    auto left = std::make_shared<std::atomic<int>>(num_failures);
    hooks.prepare = [left](void* data, int64_t num_bytes) {
      std::memset(data, 0, static_cast<size_t>(num_bytes));
      PS_CHECK((*left)-- <= 0, SystemError, num_bytes, " bytes cannot be pinned");
    };
  }
  return hooks;
}

}  // namespace

void register_memory(py::module_& module) {
  module.def("nodes_to_interleave", &nodes_to_interleave, py::arg("nodes"),
             "The nodes, when there are several that the system lets this process choose among (memory/interleave.h).");
  module.def(
      "interleave_pages",
      [](uintptr_t data, int64_t num_bytes, const std::vector<int>& nodes) {
        return interleave_pages(reinterpret_cast<void*>(data), num_bytes, nodes);
      },
      py::arg("data"), py::arg("num_bytes"), py::arg("nodes"),
      "Spreads untouched pages from address data on over NUMA nodes; whether the system agreed.");
  py::class_<HostAllocations>(module, "HostAllocations",
                              "Context: CPU tensors made here are host memory, not memory of the simulated device.")
      .def(py::init<>())
      .def("__enter__", &HostAllocations::enter)
      .def("__exit__", &HostAllocations::exit);
  // For tests: addresses as integers.
  py::class_<HostArena>(module, "HostArena", "Host memory for payloads (memory/host_arena.h).")
      .def(py::init([](int64_t limit_bytes, bool prepares, const std::vector<int>& nodes, int num_failures) {
             return std::make_unique<HostArena>(limit_bytes, region_hooks(prepares, num_failures, nodes));
           }),
           py::arg("limit_bytes"), py::arg("prepares") = false, py::arg("nodes") = std::vector<int>{},
           py::arg("num_failures") = 0)
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
