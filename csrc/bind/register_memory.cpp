#include <atomic>
#include <cstring>
#include <map>
#include <memory>

#include "backend/backend.h"
#include "backend/device_meter.h"
#include "bind/bind.h"
#include "common/check.h"
#include "memory/device_buffer_pool.h"
#include "memory/host_arena.h"
#include "memory/host_mapping.h"
#include "memory/interleave.h"

namespace nb = nanobind;

namespace patrickstar::bind {

namespace {

// Allocations of this thread do not count as memory of the simulated device.
class HostAllocations {
 public:
  void enter() { scope_ = std::make_unique<HostAllocationScope>(); }
  void exit(const nb::object&, const nb::object&, const nb::object&) { scope_.reset(); }

 private:
  std::unique_ptr<HostAllocationScope> scope_;
};

// Hooks as on CUDA, without pinning. Preparing the first `num_failures` regions fails.
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

class DeviceMemory {
 public:
  DeviceMemory(int cuda_device, int64_t num_bytes) : num_bytes_(num_bytes) {
#ifdef PATRICKSTAR_WITH_CUDA
    if (cuda_device >= 0) {
      memory_ = take_cuda_memory(cuda_device, num_bytes);
      return;
    }
#endif
    PS_CHECK(cuda_device < 0, ArgumentError, "this build of PatrickStar has no CUDA part; give -1");
    memory_ = take_cpu_memory(num_bytes);
  }

  uintptr_t address() const { return reinterpret_cast<uintptr_t>(memory_.get()); }
  int64_t num_bytes() const { return num_bytes_; }

 private:
  std::shared_ptr<void> memory_;
  int64_t num_bytes_;
};

// For tests: addresses as integers.
class AddressedArena {
 public:
  AddressedArena(int64_t limit_bytes, RegionHooks hooks)
      : arena_(std::make_shared<HostBudget>(limit_bytes), std::move(hooks)) {}

  HostArena& arena() { return arena_; }
  uintptr_t keep(HostBuffer block) {
    const auto address = reinterpret_cast<uintptr_t>(block.data);
    if (block) blocks_.emplace(address, std::move(block));
    return address;
  }
  void free(uintptr_t address) { blocks_.erase(address); }

 private:
  HostArena arena_;
  std::map<uintptr_t, HostBuffer> blocks_;
};

// Hands out addresses without memory.
class CountedBytes final : public DeviceAllocator {
 public:
  explicit CountedBytes(int64_t limit_bytes) : limit_bytes_(limit_bytes) {}

  void* allocate(int64_t num_bytes) override {
    if (taken_bytes_ + num_bytes > limit_bytes_) return nullptr;
    taken_bytes_ += num_bytes;
    return reinterpret_cast<void*>(++num_allocations_);
  }
  void* allocate_over_limit(int64_t) override { return nullptr; }
  void free(void*, int64_t num_bytes, const BusyUntil&) noexcept override { taken_bytes_ -= num_bytes; }
  bool is_idle(const BusyUntil&) override { return true; }

  int64_t num_allocations() const { return static_cast<int64_t>(num_allocations_); }

 private:
  int64_t limit_bytes_;
  int64_t taken_bytes_ = 0;
  uintptr_t num_allocations_ = 0;
};

// For tests.
class AddressedDeviceBuffers {
 public:
  AddressedDeviceBuffers(int64_t limit_bytes, double max_waste_ratio)
      : allocator_(limit_bytes), device_buffers_(allocator_, max_waste_ratio) {}

  DeviceBufferPool& device_buffers() { return device_buffers_; }
  int64_t num_allocations() const { return allocator_.num_allocations(); }
  uintptr_t acquire(int64_t num_bytes, DeviceBufferFit fit) {
    DeviceBuffer device_buffer = device_buffers_.acquire(num_bytes, fit);
    const auto address = reinterpret_cast<uintptr_t>(device_buffer.data);
    if (device_buffer) used_.emplace(address, std::move(device_buffer));
    return address;
  }
  void release(uintptr_t address) { used_.erase(address); }

 private:
  CountedBytes allocator_;
  DeviceBufferPool device_buffers_;
  std::map<uintptr_t, DeviceBuffer> used_;
};

template <typename Result>
auto of_arena(Result (HostArena::*method)() const) {
  return [method](AddressedArena& self) { return (self.arena().*method)(); };
}

}  // namespace

void register_memory(nb::module_& module) {
  module.def(
      "nodes_to_interleave", &nodes_to_interleave, nb::arg("nodes"),
      "The nodes, if there are several and this process may choose among them; else none (memory/interleave.h).");
  module.def(
      "interleave_pages",
      [](uintptr_t data, int64_t num_bytes, const std::vector<int>& nodes) {
        return interleave_pages(reinterpret_cast<void*>(data), num_bytes, nodes);
      },
      nb::arg("data"), nb::arg("num_bytes"), nb::arg("nodes"),
      "Spreads untouched pages at address data over NUMA nodes. False if the system refused.");
  nb::class_<HostAllocations>(module, "HostAllocations",
                              "Context in which CPU tensors count as host memory, not as the simulated device's.")
      .def(nb::init<>())
      .def("__enter__", &HostAllocations::enter)
      .def("__exit__", &HostAllocations::exit, nb::arg("type").none(), nb::arg("error").none(),
           nb::arg("traceback").none());
  nb::class_<HostMapping>(module, "HostMapping", "Untouched host memory of huge pages (memory/host_mapping.h).")
      .def(nb::init<int64_t>(), nb::arg("num_bytes"))
      .def_prop_ro("address", [](const HostMapping& self) { return reinterpret_cast<uintptr_t>(self.data()); });
  nb::class_<DeviceMemory>(module, "DeviceMemory",
                           R"(Device memory outside all engines, for values on their way from an
ending engine's core to the next one. Use it on the current stream, and release it when that work is over.

Args:
    cuda_device: index of the GPU; -1: the simulated device, which does not count it.
    num_bytes: size.

Raises:
    MemoryBudgetError: no room.)")
      .def(nb::init<int, int64_t>(), nb::arg("cuda_device"), nb::arg("num_bytes"),
           nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("address", &DeviceMemory::address)
      .def_prop_ro("num_bytes", &DeviceMemory::num_bytes);
  nb::class_<KeptRegions>(module, "KeptRegions",
                          "Prepared host memory, kept for the next engine (memory/host_arena.h).")
      .def(init_shared<KeptRegions>())
      .def_prop_ro("num_bytes", &KeptRegions::num_bytes);
  nb::class_<AddressedArena>(module, "HostArena", "Host memory for chunk buffers (memory/host_arena.h).")
      .def(
          "__init__",
          [](AddressedArena* self, int64_t limit_bytes, bool prepares, const std::vector<int>& nodes,
             int num_failures) { new (self) AddressedArena(limit_bytes, region_hooks(prepares, num_failures, nodes)); },
          nb::arg("limit_bytes"), nb::arg("prepares") = false, nb::arg("nodes") = std::vector<int>{},
          nb::arg("num_failures") = 0)
      .def("reserve",
           [](AddressedArena& self, const std::vector<int64_t>& block_bytes) { self.arena().reserve(block_bytes); })
      .def("prepare_ahead", [](AddressedArena& self) { self.arena().prepare_ahead(); })
      .def("keep_regions",
           [](AddressedArena& self, std::shared_ptr<KeptRegions> kept) { self.arena().keep_regions(std::move(kept)); })
      .def("reuse_regions",
           [](AddressedArena& self, std::shared_ptr<KeptRegions> kept) { self.arena().reuse_regions(std::move(kept)); })
      .def("release_reused", [](AddressedArena& self) { self.arena().release_reused(); })
      .def("release_reserved", [](AddressedArena& self) { self.arena().release_reserved(); })
      .def("allocate",
           [](AddressedArena& self, int64_t num_bytes) { return self.keep(self.arena().allocate(num_bytes)); })
      .def("free", &AddressedArena::free)
      .def("trim", [](AddressedArena& self) { self.arena().trim(); })
      .def("allocate_prepared",
           [](AddressedArena& self, int64_t num_bytes) {
             return self.keep(self.arena().try_allocate_prepared(num_bytes));
           })
      .def_prop_ro("is_preparing", [](AddressedArena& self) { return self.arena().is_preparing(); })
      .def_prop_ro("unreserved_bytes", of_arena(&HostArena::unreserved_bytes))
      .def_prop_ro("used_bytes", of_arena(&HostArena::used_bytes))
      .def_prop_ro("mapped_bytes", of_arena(&HostArena::mapped_bytes))
      .def_prop_ro("peak_mapped_bytes", of_arena(&HostArena::peak_mapped_bytes));
  nb::enum_<DeviceBufferFit>(
      module, "DeviceBufferFit",
      "Device buffers that serve a request: larger ones too, or exact ones (memory/device_buffer_pool.h).")
      .value("LOOSE", DeviceBufferFit::kLoose)
      .value("EXACT", DeviceBufferFit::kExact);
  nb::class_<AddressedDeviceBuffers>(
      module, "DeviceBufferPool",
      "Pool of device buffers (memory/device_buffer_pool.h), for tests: addresses without memory.")
      .def(nb::init<int64_t, double>(), nb::arg("limit_bytes"), nb::arg("max_waste_ratio"))
      .def("acquire", &AddressedDeviceBuffers::acquire, nb::arg("num_bytes"), nb::arg("fit") = DeviceBufferFit::kLoose,
           "The buffer's address; 0: no room.")
      .def("release", &AddressedDeviceBuffers::release, nb::arg("address"))
      .def(
          "trim", [](AddressedDeviceBuffers& self, int64_t num_bytes) { return self.device_buffers().trim(num_bytes); },
          nb::arg("num_bytes"))
      .def_prop_ro("num_allocations", &AddressedDeviceBuffers::num_allocations)
      .def_prop_ro("used_bytes", [](AddressedDeviceBuffers& self) { return self.device_buffers().used_bytes(); })
      .def_prop_ro("idle_bytes", [](AddressedDeviceBuffers& self) { return self.device_buffers().idle_bytes(); });
}

}  // namespace patrickstar::bind
