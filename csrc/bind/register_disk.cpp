#include <memory>

#include "bind/bind.h"
#include "engine/disk_states.h"
#include "memory/disk_file.h"

namespace nb = nanobind;

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
void add_fault(nb::class_<DiskFaults>& type, const char* name, std::atomic<T> DiskFaults::* member) {
  type.def_prop_rw(
      name, [member](const DiskFaults& self) { return (self.*member).load(); },
      [member](DiskFaults& self, T value) { self.*member = value; });
}

}  // namespace

void register_disk(nb::module_& module) {
  nb::enum_<DiskIo>(module, "DiskIo", "I/O interface of a disk (memory/disk_channel.h).")
      .value("AUTO", DiskIo::kAuto)
      .value("URING", DiskIo::kUring)
      .value("THREADS", DiskIo::kThreads);
  nb::class_<DiskFaults> faults(module, "DiskFaults", "Disk faults that a test injects (memory/disk_file.h).");
  faults.def(init_shared<DiskFaults>());
  add_fault(faults, "reads_before_error", &DiskFaults::reads_before_error);
  add_fault(faults, "writes_before_error", &DiskFaults::writes_before_error);
  add_fault(faults, "error_number", &DiskFaults::error_number);
  add_fault(faults, "reads_before_flip", &DiskFaults::reads_before_flip);
  add_fault(faults, "seconds_per_piece", &DiskFaults::seconds_per_piece);
  add_fault(faults, "cuts_short", &DiskFaults::cuts_short);
  add_fault(faults, "is_plain", &DiskFaults::is_plain);
  nb::class_<DiskFile>(module, "DiskFile", "A file as memory for arrays (memory/disk_file.h).")
      .def(
          "__init__",
          [](DiskFile* self, std::string folder, int64_t num_bytes, DiskIo io,
             std::shared_ptr<DiskFaults> faults_to_make, const std::vector<std::pair<uintptr_t, int64_t>>& registered) {
            std::vector<MemoryRange> memory;
            for (const auto& [data, size] : registered) memory.push_back({reinterpret_cast<char*>(data), size});
            new (self) DiskFile(std::move(folder), num_bytes, DiskFileOptions{io, std::move(faults_to_make)}, memory);
          },
          nb::arg("folder"), nb::arg("num_bytes"), nb::arg("io") = DiskIo::kAuto, nb::arg("faults") = nb::none(),
          nb::arg("registered") = std::vector<std::pair<uintptr_t, int64_t>>{}, ReleaseGil())
      .def(
          "read", [](DiskFile& self, const AddressedRanges& ranges) { return self.read(parse_ranges(ranges)); },
          nb::arg("ranges"), ReleaseGil())
      .def(
          "write", [](DiskFile& self, const AddressedRanges& ranges) { return self.write(parse_ranges(ranges)); },
          nb::arg("ranges"), ReleaseGil())
      .def_prop_ro("num_bytes", &DiskFile::num_bytes)
      .def_prop_ro("is_direct", &DiskFile::is_direct)
      .def_prop_ro("how", &DiskFile::how);
  nb::class_<DiskOptions>(module, "DiskOptions", "A disk for optimizer states (engine/disk_states.h).")
      .def(nb::init<>())
      .def_rw("folder", &DiskOptions::folder)
      .def_rw("limit_bytes", &DiskOptions::limit_bytes)
      .def_prop_rw(
          "io", [](const DiskOptions& self) { return self.file.io; },
          [](DiskOptions& self, DiskIo io) { self.file.io = io; });
}

}  // namespace patrickstar::bind
