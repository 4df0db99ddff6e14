#include <tuple>

#include "bind/bind.h"
#include "bind/runtime_calls.h"

namespace nb = nanobind;

namespace patrickstar::bind {

namespace {

using RangeTuple = std::tuple<ParamId, ArrayKind, int64_t, int64_t, int, int64_t>;
using StoredTuple = std::tuple<int, int64_t, int64_t, uintptr_t, Tier>;
using BytesTuple = std::tuple<ParamId, ArrayKind, int64_t, int64_t, int64_t>;
using FileTuple = std::tuple<int, int64_t>;

std::vector<ValueRange> value_ranges(const std::vector<RangeTuple>& ranges) {
  std::vector<ValueRange> result;
  for (const auto& [param, kind, begin, end, file, at] : ranges) result.push_back({param, kind, begin, end, file, at});
  return result;
}

std::vector<StoredBytes> byte_ranges(const std::vector<BytesTuple>& ranges) {
  std::vector<StoredBytes> result;
  for (const auto& [param, kind, begin, end, at] : ranges) result.push_back({param, kind, begin, end, at});
  return result;
}

std::vector<StoredRange> stored_ranges(const std::vector<StoredTuple>& ranges) {
  std::vector<StoredRange> result;
  for (const auto& [array, begin, end, address, where] : ranges) {
    result.push_back({array, begin, end, reinterpret_cast<const void*>(address), where});
  }
  return result;
}

std::vector<RangeFile> range_files(const std::vector<FileTuple>& files) {
  std::vector<RangeFile> result;
  for (const auto& [descriptor, num_bytes] : files) result.push_back({descriptor, num_bytes});
  return result;
}

void bind_storage(OpenEngine& open, ChunkId chunk, uintptr_t storage) {
  ChunkStore& store = open.memory.store();
  const ArrayId id{chunk, ArrayKind::kParam};
  store.storage(chunk) =
      ParamStorage(pointer<void>(storage), store.num_bytes(id),
                   store.describe(id) +
                       ": its memory is not on the device now. PatrickStar brings parameters in when a module or a "
                       "torch function uses them; code that reads a tensor's memory in another way must run inside the "
                       "module that owns it. Second derivatives (create_graph=True) need all parameters on the "
                       "device: raise device_memory.");
}

std::vector<uintptr_t> addresses_of(const std::vector<const void*>& pointers) {
  std::vector<uintptr_t> addresses;
  for (const void* pointer : pointers) addresses.push_back(reinterpret_cast<uintptr_t>(pointer));
  return addresses;
}

// Returns (addresses of values, regions with values, all other regions).
nb::tuple set_aside(Runtime& self, const std::vector<RangeTuple>& ranges) {
  const auto aside = without_gil<Call::kGiveUpValues>(self, [&ranges](OpenEngine& open) {
    auto free = std::make_shared<KeptRegions>();
    open.memory.arena().keep_regions(free);
    open.speculation.release_memory();
    return open.ranges.set_aside(value_ranges(ranges), std::move(free));
  });
  std::vector<uintptr_t> addresses;
  for (const float* values : aside.values) addresses.push_back(reinterpret_cast<uintptr_t>(values));
  return nb::make_tuple(addresses, aside.with, aside.free);
}

void discard_arrays(OpenEngine& open, ChunkId chunk) {
  for (int kind = 0; kind < kNumArrayKinds; ++kind) open.memory.discard({chunk, static_cast<ArrayKind>(kind)});
  open.memory.device_buffers().trim(INT64_MAX);
}

}  // namespace

// Chunks get storages first, then parameters their values. Reads go to host memory.
void register_runtime_values(RuntimeClass& runtime) {
  runtime.def("bind_storage", bound<Call::kInspect>(&bind_storage))
      .def("seal_storage",
           bound<Call::kInspect>(+[](OpenEngine& open, ChunkId chunk) { open.memory.store().storage(chunk).detach(); }))
      .def("write_values", bound_to_param<Call::kWriteValues>(+[](OpenEngine& open, ParamId param, ArrayKind kind,
                                                                  uintptr_t values, Tier where) {
             const Tier resting_tier = open.memory.store().resting_tier(open.layout().placement(param).chunk);
             open.values.write(param, kind, {reinterpret_cast<const float*>(values), where}, resting_tier);
           }))
      .def("read_values",
           bound_to_param<Call::kReadValues>(+[](OpenEngine& open, ParamId param, ArrayKind kind, uintptr_t values) {
             open.values.read(param, kind, reinterpret_cast<float*>(values));
           }))
      .def("read_own_values",
           bound_to_param<Call::kReadValues>(+[](OpenEngine& open, ParamId param, ArrayKind kind, uintptr_t values) {
             open.values.read_own(param, kind, reinterpret_cast<float*>(values));
           }))
      .def("rows_are_on_host", bound<Call::kInspect>(+[](OpenEngine& open, ParamId param) {
             return open.step.is(StepState::kEvaluation) && open.rows.are_on_host(param);
           }),
           nb::arg("param"), "True in a forward without gradients if the device has no value (engine/value_rows.h).")
      .def("copy_rows", bound_to_param<Call::kReadValues>(
                            +[](OpenEngine& open, ParamId param, std::vector<int64_t> rows, int64_t row_numel,
                                uintptr_t to) { open.rows.copy(param, rows, row_numel, pointer<void>(to)); }))
      .def(
          "read_ranges",
          bound<Call::kReadValues>(+[](OpenEngine& open, std::vector<RangeTuple> ranges, std::vector<FileTuple> files) {
            open.ranges.read(value_ranges(ranges), range_files(files));
          }),
          "Reads this rank's values: [(param, kind, begin, end, file or -1, offset or address)], [(descriptor, "
          "bytes)].")
      .def("stored_type", bound<Call::kInspect>(&OpenEngine::ranges, &ValueRanges::stored_type), nb::arg("param"),
           nb::arg("kind"), "Type of elements that read_stored() reads.")
      .def("read_stored", bound<Call::kReadValues>(+[](OpenEngine& open, std::vector<BytesTuple> ranges) {
             return open.ranges.read_stored(byte_ranges(ranges));
           }),
           nb::arg("ranges"),
           "Reads bytes of this rank's parts into memory: [(param, kind, begin, end, address)], all in bytes of "
           "stored_type(); the CRC-32C of each. An 8-bit state is its codes and then its float32 scales.")
      .def("write_ranges", bound<Call::kWriteValues>(
                               +[](OpenEngine& open, std::vector<RangeTuple> ranges, std::vector<FileTuple> files) {
                                 open.ranges.write(value_ranges(ranges), range_files(files));
                               }))
      .def("stored_bytes", bound<Call::kInspect>(&OpenEngine::ranges, &ValueRanges::stored_bytes), nb::arg("param"),
           "Bytes per element of each array of the parameter; empty: its arrays cannot be copied as stored.")
      .def("is_stored_on_device", bound<Call::kInspect>(&OpenEngine::ranges, &ValueRanges::is_stored_on_device),
           nb::arg("param"))
      .def("stored_on_device", bound<Call::kDevice>(+[](OpenEngine& open, ParamId param) {
             return addresses_of(open.ranges.stored_on_device(param));
           }))
      .def(
          "write_stored",
          bound_to_param<Call::kWriteValues>(+[](OpenEngine& open, ParamId param, std::vector<StoredTuple> ranges) {
            open.ranges.write_stored(param, stored_ranges(ranges));
          }),
          "Writes elements of this rank's part: [(array, begin, end, address, tier)], arrays as in stored_on_device().")
      .def("leave_stored", bound_to_chunk<Call::kGiveUpValues>(&discard_arrays), nb::arg("chunk"))
      .def("release_chunk", bound_to_chunk<Call::kGiveUpValues>(+[](OpenEngine& open, ChunkId chunk) {
             open.disk.forget(chunk);
             discard_arrays(open, chunk);
             open.memory.arena().trim();
           }))
      .def("set_aside", &set_aside)
      .def("take_host_memory", bound<Call::kInspect>(+[](OpenEngine& open, int64_t num_bytes) {
             return reinterpret_cast<uintptr_t>(open.host_loans.take(num_bytes));
           }),
           nb::arg("num_bytes"), "Address of memory until give_back_host_memory(), or 0 (engine/host_loans.h).")
      .def("give_back_host_memory", bound<Call::kInspect>(+[](OpenEngine& open, uintptr_t address) {
             open.host_loans.give_back(pointer<void>(address));
           }))
      .def("read_gradient", bound_to_param<Call::kGradients>(+[](OpenEngine& open, ParamId param, uintptr_t values) {
             const ArrayKind source = open.gradients.source(open.layout().placement(param).chunk);
             open.values.read_gradient(param, source, reinterpret_cast<float*>(values));
           }))
      .def("write_gradient",
           bound_to_param<Call::kGradients>(+[](OpenEngine& open, ParamId param, uintptr_t values, Tier where) {
             const ChunkId chunk = open.layout().placement(param).chunk;
             open.flow.note_rewritten(chunk);
             open.values.write_gradient(param, open.gradients.source(chunk),
                                        {reinterpret_cast<const float*>(values), where});
           }))
      .def("clear_gradient", bound<Call::kInspect>(&OpenEngine::flow, &GradientFlow::clear_param))
      .def("has_gradient",
           bound<Call::kInspect>(+[](OpenEngine& open, ParamId param) { return open.gradients.has(param); }))
      .def("gradients_pending", bound<Call::kInspect>(&OpenEngine::flow, &GradientFlow::pending))
      .def("set_group", bound<Call::kInspect>(&OpenEngine::updates, &Updates::set_group))
      .def("step_count", bound<Call::kInspect>(&OpenEngine::updates, &Updates::step_count))
      .def("set_step_count", bound<Call::kInspect>(&OpenEngine::updates, &Updates::set_step_count));
}

}  // namespace patrickstar::bind
