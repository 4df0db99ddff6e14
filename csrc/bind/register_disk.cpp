#include <pybind11/stl.h>

#include <memory>

#include "bind/bind.h"
#include "engine/disk_states.h"
#include "memory/disk_file.h"

namespace py = pybind11;

namespace patrickstar::bind {

namespace {

// (address, offset in the file, bytes)
using AddressedRanges = std::vector<std::tuple<uintptr_t, int64_t, int64_t>>;

std::vector<DiskRange> parse_ranges(const AddressedRanges& ranges) {
  std::vector<DiskRange> result;
  for (const auto& [data, offset, num_bytes] : ranges) {
    result.push_back({reinterpret_cast<void*>(data), offset, num_bytes});
  }
  return result;
}

// Binds an atomic member as a property.
template <typename T>
void add_fault(py::class_<DiskFaults, std::shared_ptr<DiskFaults>>& type, const char* name,
               std::atomic<T> DiskFaults::* member) {
  type.def_property(
      name, [member](const DiskFaults& self) { return (self.*member).load(); },
      [member](DiskFaults& self, T value) { self.*member = value; });
}

}  // namespace

void register_disk(py::module_& module) {
  py::enum_<DiskIo>(module, "DiskIo", "I/O interface of a disk (memory/disk_channel.h).")
      .value("AUTO", DiskIo::kAuto)
      .value("URING", DiskIo::kUring)
      .value("THREADS", DiskIo::kThreads);
  py::class_<DiskFaults, std::shared_ptr<DiskFaults>> faults(module, "DiskFaults",
                                                             "Disk faults that a test injects (memory/disk_file.h).");
  faults.def(py::init<>());
  add_fault(faults, "reads_before_error", &DiskFaults::reads_before_error);
  add_fault(faults, "writes_before_error", &DiskFaults::writes_before_error);
  add_fault(faults, "error_number", &DiskFaults::error_number);
  add_fault(faults, "reads_before_flip", &DiskFaults::reads_before_flip);
  add_fault(faults, "seconds_per_piece", &DiskFaults::seconds_per_piece);
  add_fault(faults, "cuts_short", &DiskFaults::cuts_short);
  add_fault(faults, "is_plain", &DiskFaults::is_plain);
  py::class_<DiskFile>(module, "DiskFile", "A file as memory for arrays (memory/disk_file.h).")
      .def(py::init([](std::string folder, int64_t num_bytes, DiskIo io, std::shared_ptr<DiskFaults> faults_to_make,
                       const std::vector<std::pair<uintptr_t, int64_t>>& registered) {
             std::vector<MemoryRange> memory;
             for (const auto& [data, size] : registered) memory.push_back({reinterpret_cast<char*>(data), size});
             return std::make_unique<DiskFile>(std::move(folder), num_bytes,
                                               DiskFileOptions{io, std::move(faults_to_make)}, memory);
           }),
           py::arg("folder"), py::arg("num_bytes"), py::arg("io") = DiskIo::kAuto, py::arg("faults") = nullptr,
           py::arg("registered") = std::vector<std::pair<uintptr_t, int64_t>>{}, ReleaseGil())
      .def(
          "read", [](DiskFile& self, const AddressedRanges& ranges) { return self.read(parse_ranges(ranges)); },
          py::arg("ranges"), ReleaseGil())
      .def(
          "write", [](DiskFile& self, const AddressedRanges& ranges) { return self.write(parse_ranges(ranges)); },
          py::arg("ranges"), ReleaseGil())
      .def_property_readonly("num_bytes", &DiskFile::num_bytes)
      .def_property_readonly("is_direct", &DiskFile::is_direct)
      .def_property_readonly("how", &DiskFile::how);
  py::class_<DiskOptions>(module, "DiskOptions", "A disk for optimizer states (engine/disk_states.h).")
      .def(py::init<>())
      .def_readwrite("folder", &DiskOptions::folder)
      .def_readwrite("limit_bytes", &DiskOptions::limit_bytes)
      .def_property(
          "io", [](const DiskOptions& self) { return self.file.io; },
          [](DiskOptions& self, DiskIo io) { self.file.io = io; });
}

}  // namespace patrickstar::bind
