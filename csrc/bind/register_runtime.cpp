#include <pybind11/stl.h>

#include <mutex>
#include <optional>
#include <tuple>

#include "bind/bind.h"
#include "engine/runtime.h"
#include "engine/speculation.h"
#include "plan/chunk_bytes.h"
#include "plan/placement.h"

namespace py = pybind11;

namespace patrickstar::bind {

namespace {

using ReleaseGil = py::call_guard<py::gil_scoped_release>;

void register_layout(py::module_& module) {
  py::class_<Layout>(module, "Layout", "Which chunk and offset each parameter has (chunk/layout.h).")
      .def_static(
          "pack",
          [](const std::vector<int64_t>& numels, const std::vector<DType>& dtypes, const std::vector<bool>& trainable,
             int64_t chunk_numel, int num_ranks, int rank, const std::vector<StateFormat>& states,
             const std::vector<QuantType>& quantization) {
            std::vector<ParamSpec> params;
            for (size_t i = 0; i < numels.size(); ++i) {
              params.push_back({numels[i], dtypes.at(i), trainable.at(i), states.empty() ? StateFormat{} : states.at(i),
                                quantization.empty() ? QuantType::kNone : quantization.at(i)});
            }
            return Layout::pack(params, chunk_numel, {num_ranks, rank});
          },
          py::arg("numels"), py::arg("dtypes"), py::arg("trainable"), py::arg("chunk_numel"), py::arg("num_ranks") = 1,
          py::arg("rank") = 0, py::arg("states") = std::vector<StateFormat>{},
          py::arg("quantization") = std::vector<QuantType>{})
      .def_property_readonly("num_chunks", &Layout::num_chunks)
      .def_property_readonly("chunk_numel", &Layout::chunk_numel)
      .def_property_readonly("num_ranks", [](const Layout& self) { return self.sharding().num_ranks; })
      .def("placement", [](const Layout& self,
                           ParamId id) { return py::make_tuple(self.placement(id).chunk, self.placement(id).offset); })
      .def("shard_of",
           [](const Layout& self, ParamId id) {
             const ParamShard shard = self.shard_of(id);
             return py::make_tuple(shard.begin, shard.numel, shard.offset);
           })
      .def("train", &Layout::train)
      .def("chunk", [](const Layout& self, ChunkId id) {
        const ChunkSpec& chunk = self.chunks().at(static_cast<size_t>(id));
        py::dict result;
        result["numel"] = chunk.numel;
        result["shard_numel"] = chunk.shard_numel;
        result["dtype"] = chunk.dtype;
        result["trainable"] = chunk.trainable;
        result["states"] = chunk.states;
        result["quantization"] = chunk.quantization;
        result["leading_state"] = chunk.leading_state();
        result["param_bytes"] = chunk.num_bytes(ArrayKind::kParamShard);
        result["home_bytes"] = home_bytes(chunk);
        result["new_value_bytes"] = least_new_bytes(self, id);
        result["disk_bytes"] = disk_bytes(chunk);
        result["params"] = chunk.params;
        return result;
      });
}

void register_options(py::module_& module) {
  py::enum_<StatePlacement>(module, "StatePlacement")
      .value("HYBRID", StatePlacement::kHybrid)
      .value("HOST", StatePlacement::kHost);
  py::enum_<Tracking>(module, "Tracking")
      .value("TRAINING", Tracking::kTraining)
      .value("UNTRACKED", Tracking::kUntracked);
  py::enum_<Attempt>(module, "Attempt")
      .value("FIRST", Attempt::kFirst)
      .value("AGAIN", Attempt::kAgain)
      .value("LAST", Attempt::kLast)
      .value("ONLY", Attempt::kOnly);
  py::enum_<StepProgress>(module, "StepProgress", "How far a step that has failed had come (engine/runtime.h).")
      .value("UNTOUCHED", StepProgress::kUntouched)
      .value("IN_PART", StepProgress::kInPart)
      .value("TORN", StepProgress::kTorn)
      .value("ENDING", StepProgress::kEnding);
  py::enum_<WeightDecay>(module, "WeightDecay")
      .value("L2", WeightDecay::kL2)
      .value("DECOUPLED", WeightDecay::kDecoupled);
  py::enum_<BiasCorrection>(module, "BiasCorrection")
      .value("APPLIED", BiasCorrection::kApplied)
      .value("NONE", BiasCorrection::kNone);
  py::class_<DelayOptions>(module, "DelayOptions", "A simulated link, and random delays (backend/delaying_backend.h).")
      .def(py::init<>())
      .def_readwrite("bytes_per_second", &DelayOptions::bytes_per_second)
      .def_readwrite("latency_seconds", &DelayOptions::latency_seconds)
      .def_readwrite("max_random_seconds", &DelayOptions::max_random_seconds)
      .def_readwrite("seed", &DelayOptions::seed);
  py::enum_<SpeculationMode>(module, "SpeculationMode")
      .value("OFF", SpeculationMode::kOff)
      .value("ON", SpeculationMode::kOn)
      .value("COMMIT", SpeculationMode::kCommit);
  py::class_<DeviceOptions>(module, "DeviceOptions", "What engines of one process share (engine/shared_device.h).")
      .def(py::init<>())
      .def_readwrite("cuda_device", &DeviceOptions::cuda_device)
      .def_readwrite("device_limit_bytes", &DeviceOptions::device_limit_bytes)
      .def_readwrite("host_limit_bytes", &DeviceOptions::host_limit_bytes)
      .def_readwrite("limit_rounding_bytes", &DeviceOptions::limit_rounding_bytes)
      .def_readwrite("left_by_tide_bytes", &DeviceOptions::left_by_tide_bytes)
      .def_readwrite("follows_tide", &DeviceOptions::follows_tide)
      .def_readwrite("host_threads", &DeviceOptions::host_threads)
      .def_readwrite("delays", &DeviceOptions::delays);
  py::class_<ResidencyOptions>(module, "ResidencyOptions", "Which states are on the device (engine/residency.h).")
      .def(py::init<>())
      .def_readwrite("warmup_payload_ratio", &ResidencyOptions::warmup_payload_ratio)
      .def_readwrite("margin_use_ratio", &ResidencyOptions::margin_use_ratio)
      .def_readwrite("payload_limit_bytes", &ResidencyOptions::payload_limit_bytes)
      .def_readwrite("state_placement", &ResidencyOptions::state_placement)
      .def_readwrite("backwards", &ResidencyOptions::backwards);
  py::class_<EngineOptions>(module, "EngineOptions")
      .def(py::init<>())
      .def_readwrite("device", &EngineOptions::device)
      .def_readwrite("residency", &EngineOptions::residency)
      .def_readwrite("disk", &EngineOptions::disk)
      .def_readwrite("ample_limit_bytes", &EngineOptions::ample_limit_bytes)
      .def_readwrite("ample_extra_bytes", &EngineOptions::ample_extra_bytes)
      .def_readwrite("speculation", &EngineOptions::speculation);
}

// The alternatives of GroupOptions (engine/group_options.h).
void register_group_options(py::module_& module) {
  py::enum_<SgdMomentum>(module, "SgdMomentum", "How SGD's momentum makes an update (engine/group_options.h).")
      .value("HEAVY_BALL", SgdMomentum::kHeavyBall)
      .value("NESTEROV", SgdMomentum::kNesterov);
  py::class_<AdamOptions>(module, "AdamOptions", "Of Adam and AdamW: a parameter group in one step.")
      .def(py::init([](double lr, double beta1, double beta2, double eps, double weight_decay, WeightDecay mode,
                       BiasCorrection bias_correction) {
             return AdamOptions{lr, beta1, beta2, eps, weight_decay, mode, bias_correction};
           }),
           py::kw_only(), py::arg("lr"), py::arg("beta1"), py::arg("beta2"), py::arg("eps"), py::arg("weight_decay"),
           py::arg("mode"), py::arg("bias_correction") = BiasCorrection::kApplied);
  py::class_<LionOptions>(module, "LionOptions", "Of Lion: a parameter group in one step.")
      .def(py::init([](double lr, double beta1, double beta2, double weight_decay) {
             return LionOptions{lr, beta1, beta2, weight_decay};
           }),
           py::kw_only(), py::arg("lr"), py::arg("beta1"), py::arg("beta2"), py::arg("weight_decay"));
  py::class_<SgdOptions>(module, "SgdOptions", "Of SGD with momentum: a parameter group in one step.")
      .def(py::init([](double lr, double momentum, double dampening, double weight_decay, SgdMomentum mode) {
             return SgdOptions{lr, momentum, dampening, weight_decay, mode};
           }),
           py::kw_only(), py::arg("lr"), py::arg("momentum"), py::arg("dampening"), py::arg("weight_decay"),
           py::arg("mode") = SgdMomentum::kHeavyBall);
}

py::dict describe_report(const RuntimeReport& report) {
  const Counters& counters = report.counters;
  py::dict result;
  result["device_budget_bytes"] = report.device_budget_bytes;
  result["device_peak_bytes"] = report.device_peak_bytes;
  result["device_tide_bytes"] = report.device_tide_bytes;
  result["device_payload_bytes"] = report.device_payload_bytes;
  result["host_budget_bytes"] = report.host_budget_bytes;
  result["host_bytes"] = report.host_bytes;
  result["host_peak_bytes"] = report.host_peak_bytes;
  result["predicted_host_peak_bytes"] = report.predicted_host_peak_bytes;
  result["uploaded_bytes"] = counters.uploaded_bytes;
  result["downloaded_bytes"] = counters.downloaded_bytes;
  result["host_interleaved_nodes"] = format_cpu_list(report.interleaved_nodes);
  result["num_host_threads"] = report.num_host_threads;
  result["host_thread_cpus"] = format_cpu_list(report.pinned_cpus);
  result["num_evictions"] = counters.num_evictions;
  result["num_pressure_evictions"] = counters.num_pressure_evictions;
  result["num_prefetch_hits"] = counters.num_prefetch_hits;
  result["num_on_demand_fetches"] = counters.num_on_demand_fetches;
  result["num_moments"] = counters.num_moments;
  result["num_replayed_moments"] = counters.num_replayed_moments;
  result["num_plans"] = counters.num_plans;
  result["num_speculated_updates"] = counters.num_speculated_updates;
  result["num_committed_updates"] = counters.num_committed_updates;
  result["num_updates_taken_over"] = counters.num_updates_taken_over;
  result["num_settled_updates"] = counters.num_settled_updates;
  result["num_values_in_place"] = report.num_values_in_place;
  result["stashed_bytes"] = counters.stashed_bytes;
  result["num_states_passes"] = counters.num_states_passes;
  result["num_visits"] = counters.num_visits;
  result["num_steps"] = counters.num_steps;
  result["num_skipped_steps"] = counters.num_skipped_steps;
  result["gathered_bytes"] = counters.gathered_bytes;
  result["scattered_bytes"] = counters.scattered_bytes;
  result["num_chunks"] = report.num_chunks;
  result["chunk_numel"] = report.chunk_numel;
  result["num_chunk_elements"] = report.num_chunk_elements;
  result["num_device_state_chunks"] = report.num_device_state_chunks;
  result["num_device_quantized_chunks"] = report.num_device_quantized_chunks;
  result["num_disk_chunks"] = report.num_disk_chunks;
  result["disk_bytes"] = report.disk_bytes;
  result["disk_read_bytes"] = counters.disk_read_bytes;
  result["disk_written_bytes"] = counters.disk_written_bytes;
  result["disk_wait_seconds"] = report.disk_wait_seconds;
  result["disk_io"] = report.disk_io;
  result["planned_uploaded_bytes"] = report.planned_uploaded_bytes;
  result["planned_downloaded_bytes"] = report.planned_downloaded_bytes;
  result["predicted_step_seconds"] = report.predicted_step_seconds;
  return result;
}

// self.method() without the interpreter: another thread may hold the runtime's lock for long.
template <typename Result>
Result without_gil(Runtime& self, Result (Runtime::*method)()) {
  const py::gil_scoped_release release;
  return (self.*method)();
}

// None before a traced step is over.
py::object take_trace(Runtime& self, TraceReader reader, py::dict (*describe)(const StepTrace&)) {
  std::optional<StepTrace> trace;
  {
    const py::gil_scoped_release release;
    trace = self.take_trace(reader);
  }
  return trace ? py::object(describe(*trace)) : py::none();
}

// {"rates": Rates, "compute_seconds": [float], "updates": [UpdateAt], "activations": [(int, int, int)]}: the
// simulator's arguments.
py::object describe_times(const std::optional<StepTimes>& times) {
  if (!times) return py::none();
  py::dict result;
  result["rates"] = times->rates;
  result["compute_seconds"] = times->shape.compute_seconds;
  result["updates"] = times->shape.updates;
  result["activations"] = describe_copies(times->shape.activations);
  return result;
}

void adopt_timeline(Runtime& self, const py::list& moments, const py::object& times) {
  Timeline timeline = parse_timeline(moments);
  std::optional<StepTimes> parsed;
  if (!times.is_none()) {
    parsed = {
        times["rates"].cast<Rates>(),
        {times["compute_seconds"].cast<std::vector<double>>(), times["updates"].cast<std::vector<UpdateAt>>(), {}}};
    parsed->shape.activations = parse_copies(times["activations"].cast<CopiesByMoment>());
  }
  const py::gil_scoped_release release;
  self.adopt_timeline(std::move(timeline), std::move(parsed));
}

using RangeTuple = std::tuple<ParamId, ArrayKind, int64_t, int64_t, int, int64_t>;
using StoredTuple = std::tuple<int, int64_t, int64_t, uintptr_t, Tier>;
using FileTuple = std::tuple<int, int64_t>;

std::vector<ValueRange> value_ranges(const std::vector<RangeTuple>& ranges) {
  std::vector<ValueRange> result;
  for (const auto& [param, kind, begin, end, file, at] : ranges) result.push_back({param, kind, begin, end, file, at});
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

// What nobody closed is closed without the interpreter.
struct DeleteWithoutGil {
  void operator()(Runtime* runtime) const {
    const py::gil_scoped_release release;
    delete runtime;
  }
};
using RuntimeHolder = std::unique_ptr<Runtime, DeleteWithoutGil>;

}  // namespace

void register_runtime(py::module_& module) {
  register_layout(module);
  register_options(module);
  register_group_options(module);
  module.attr("UNLIMITED") = kUnlimited;
  py::enum_<Vacate>(module, "Vacate", "What leaves the device to make room (engine/shared_device.h).")
      .value("VALUES", Vacate::kValues)
      .value("EVERYTHING", Vacate::kEverything);
  module.def("working_set_bytes", &working_set_bytes, py::arg("layout"), py::arg("module_params"),
             "Least device memory for payloads: the largest module's chunks and their gradients' (plan/placement.h).");
  module.def(
      "shared_budgets",
      [](int cuda_device) -> std::optional<std::pair<int64_t, int64_t>> {
        const std::shared_ptr<SharedDevice> device = SharedDevice::find(cuda_device);
        if (device == nullptr) return std::nullopt;
        return std::make_pair(device->options().device_limit_bytes, device->options().host_limit_bytes);
      },
      py::arg("cuda_device"), ReleaseGil(),
      "(device bytes, host bytes) of the engines that are open on a device; None: none is.");
  py::class_<Collectives, std::shared_ptr<Collectives>>(module, "Collectives",
                                                        "What ranks do together (engine/collectives.h).")
      .def(py::init<std::shared_ptr<Communicator>, std::shared_ptr<Communicator>, std::shared_ptr<ControlGroup>>(),
           py::arg("gather"), py::arg("scatter"), py::arg("control"))
      .def("check_same_plan", &Collectives::check_same_plan, py::arg("fingerprint"), ReleaseGil())
      .def_property_readonly("num_ranks", &Collectives::num_ranks);
  py::class_<Runtime, UseListener, RuntimeHolder>(module, "Runtime", "The core's façade (engine/runtime.h).")
      .def(py::init([](Layout layout, std::vector<std::string> param_names,
                       const std::vector<std::vector<ParamId>>& module_params, const EngineOptions& options,
                       std::shared_ptr<Collectives> collectives, std::shared_ptr<KeptRegions> kept) {
             if (collectives == nullptr) collectives = std::make_shared<Collectives>();
             return RuntimeHolder(new Runtime(std::move(layout), std::move(param_names), module_params, options,
                                              std::move(collectives), std::move(kept)));
           }),
           py::arg("layout"), py::arg("param_names"), py::arg("module_params"), py::arg("options"),
           py::arg("collectives") = nullptr, py::arg("kept") = nullptr, ReleaseGil())
      .def("keep_memory", &Runtime::keep_memory, ReleaseGil())
      .def("bind_storage",
           [](Runtime& self, ChunkId chunk, uintptr_t storage) {
             const py::gil_scoped_release release;
             self.bind_storage(chunk, reinterpret_cast<c10::StorageImpl*>(storage));
           })
      .def("seal_storage", &Runtime::seal_storage, ReleaseGil())
      .def(
          "write_values",
          [](Runtime& self, ParamId param, ArrayKind kind, uintptr_t values, Tier where) {
            self.write_values(param, kind, {reinterpret_cast<const float*>(values), where});
          },
          ReleaseGil())
      .def(
          "read_values",
          [](Runtime& self, ParamId param, ArrayKind kind, uintptr_t values) {
            self.read_values(param, kind, reinterpret_cast<float*>(values));
          },
          ReleaseGil())
      .def(
          "read_own_values",
          [](Runtime& self, ParamId param, ArrayKind kind, uintptr_t values) {
            self.read_own_values(param, kind, reinterpret_cast<float*>(values));
          },
          ReleaseGil())
      .def(
          "read_ranges",
          [](Runtime& self, const std::vector<RangeTuple>& ranges, const std::vector<FileTuple>& files) {
            const py::gil_scoped_release release;
            self.read_ranges(value_ranges(ranges), range_files(files));
          },
          "[(param, kind, begin, end, file or -1, offset or address)], [(descriptor, bytes)]: values of this rank.")
      .def("write_ranges",
           [](Runtime& self, const std::vector<RangeTuple>& ranges, const std::vector<FileTuple>& files) {
             const py::gil_scoped_release release;
             self.write_ranges(value_ranges(ranges), range_files(files));
           })
      .def("stored_bytes", &Runtime::stored_bytes, py::arg("param"), ReleaseGil(),
           "Bytes of an element of each array that the parameter consists of; none: they cannot be copied as stored.")
      .def("is_stored_on_device", &Runtime::is_stored_on_device, py::arg("param"), ReleaseGil())
      .def("stored_on_device",
           [](Runtime& self, ParamId param) {
             std::vector<uintptr_t> addresses;
             const py::gil_scoped_release release;
             for (const void* data : self.stored_on_device(param))
               addresses.push_back(reinterpret_cast<uintptr_t>(data));
             return addresses;
           })
      .def(
          "write_stored",
          [](Runtime& self, ParamId param, const std::vector<StoredTuple>& ranges) {
            const py::gil_scoped_release release;
            self.write_stored(param, stored_ranges(ranges));
          },
          "[(array, begin, end, address, tier)]: elements of this rank's part, as stored_on_device() has them.")
      .def("return_cached", &Runtime::return_cached, ReleaseGil())
      .def("drop_derivable", &Runtime::drop_derivable, ReleaseGil())
      .def(
          "copy_on_device",
          [](Runtime& self, uintptr_t to, uintptr_t from, int64_t num_bytes) {
            self.copy_on_device(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), num_bytes);
          },
          py::arg("to"), py::arg("from_"), py::arg("num_bytes"), ReleaseGil())
      .def("leave_stored", &Runtime::leave_stored, py::arg("chunk"), ReleaseGil())
      .def("set_aside",
           [](Runtime& self, const std::vector<RangeTuple>& ranges) {
             ValueRanges::SetAside aside;
             {
               const py::gil_scoped_release release;
               aside = self.set_aside(value_ranges(ranges));
             }
             std::vector<uintptr_t> addresses;
             for (const float* values : aside.values) addresses.push_back(reinterpret_cast<uintptr_t>(values));
             return std::make_tuple(addresses, aside.with, aside.free);
           })
      .def(
          "read_gradient",
          [](Runtime& self, ParamId param, uintptr_t values) {
            self.read_gradient(param, reinterpret_cast<float*>(values));
          },
          ReleaseGil())
      .def(
          "write_gradient",
          [](Runtime& self, ParamId param, uintptr_t values, Tier where) {
            self.write_gradient(param, {reinterpret_cast<const float*>(values), where});
          },
          ReleaseGil())
      .def("set_visits", &Runtime::set_visits, py::arg("chunks"), py::arg("piece_numel") = kVisitingPiece,
           "For tests: whose updates the device makes for the host until the next plan by time, by chunk, in pieces of "
           "so many elements.")
      .def("adopt_timeline", &adopt_timeline, py::arg("moments"), py::arg("times") = py::none())
      .def("make_states", &Runtime::make_states, ReleaseGil())
      .def("discard_states", &Runtime::discard_states, ReleaseGil())
      .def("train", &Runtime::train, ReleaseGil())
      .def("close", &Runtime::close, ReleaseGil())
      .def("release_chunk", &Runtime::release_chunk, ReleaseGil())
      .def("begin_forward", &Runtime::begin_forward, ReleaseGil())
      .def("end_forward", &Runtime::end_forward, ReleaseGil())
      .def("begin_backward", &Runtime::begin_backward, py::arg("expected_groups") = std::vector<GroupOptions>{},
           py::arg("expected_grad_scale") = 1.0, ReleaseGil())
      .def(
          "fold_gradient",
          [](Runtime& self, ParamId param, uintptr_t data) {
            self.fold_gradient(param, reinterpret_cast<const void*>(data));
          },
          ReleaseGil())
      .def("end_backward", &Runtime::end_backward, ReleaseGil())
      .def("keep_joint_backward", &Runtime::keep_joint_backward, ReleaseGil())
      .def("abort_forward", &Runtime::abort_forward, ReleaseGil())
      .def("abort_backward", &Runtime::abort_backward, ReleaseGil())
      .def("undo_forward", &Runtime::undo_forward, ReleaseGil())
      .def("meet_ranks", &Runtime::meet_ranks, ReleaseGil())
      .def("tide_bytes", &Runtime::tide_bytes, ReleaseGil())
      .def("host_room_of_activations", &Runtime::host_room_of_activations, ReleaseGil())
      .def("take_live_tide_peak", &Runtime::take_live_tide_peak, ReleaseGil())
      .def("keep_absent_activations", &Runtime::keep_absent_activations, ReleaseGil())
      .def(
          "stash_activation",
          [](Runtime& self, uintptr_t data, int64_t num_bytes) {
            return self.stash_activation(reinterpret_cast<const void*>(data), num_bytes);
          },
          ReleaseGil())
      .def("is_stashed", &Runtime::is_stashed, ReleaseGil())
      .def("finish_stashing", &Runtime::finish_stashing, ReleaseGil())
      .def(
          "fetch_activation",
          [](Runtime& self, int64_t ticket, uintptr_t to) {
            self.fetch_activation(ticket, reinterpret_cast<void*>(to));
          },
          ReleaseGil())
      .def("await_activation", &Runtime::await_activation, ReleaseGil())
      .def("drop_activation", &Runtime::drop_activation, ReleaseGil())
      .def("vacate_device", &Runtime::vacate_device, ReleaseGil())
      .def("prepare_step", &Runtime::prepare_step, py::arg("left_out") = std::vector<ParamId>(), ReleaseGil())
      .def("apply_step", &Runtime::apply_step, ReleaseGil())
      .def("skip_step", &Runtime::skip_step, ReleaseGil())
      .def("drop_step", &Runtime::drop_step, ReleaseGil())
      .def("clear_gradients", &Runtime::clear_gradients, ReleaseGil())
      .def("forget_plan", &Runtime::forget_plan, ReleaseGil())
      .def("clear_gradient", &Runtime::clear_gradient, ReleaseGil())
      .def("has_gradient", &Runtime::has_gradient, ReleaseGil())
      .def("gradients_pending", &Runtime::gradients_pending, ReleaseGil())
      .def("set_group", &Runtime::set_group, ReleaseGil())
      .def("step_count", &Runtime::step_count, ReleaseGil())
      .def("set_step_count", &Runtime::set_step_count, ReleaseGil())
      .def(
          "start_trace", [](Runtime& self) { self.start_trace(TraceReader::kUser); }, ReleaseGil())
      .def("take_trace", [](Runtime& self) { return take_trace(self, TraceReader::kUser, &describe_trace); })
      .def(
          "start_stall_trace", [](Runtime& self) { self.start_trace(TraceReader::kMonitor); }, ReleaseGil())
      .def("take_stalls", [](Runtime& self) { return take_trace(self, TraceReader::kMonitor, &describe_stalls); })
      .def_property_readonly(
          "disk_faults", [](Runtime& self) { return without_gil(self, &Runtime::disk_faults); },
          "What a test makes the disk do.")
      .def_property_readonly("closed", [](Runtime& self) { return without_gil(self, &Runtime::closed); })
      .def_property_readonly("step_progress", [](Runtime& self) { return without_gil(self, &Runtime::step_progress); })
      .def_property_readonly("num_committed", [](Runtime& self) { return without_gil(self, &Runtime::num_committed); })
      .def_property_readonly(
          "replays", [](Runtime& self) { return without_gil(self, &Runtime::replays); },
          "The running step goes as planned so far.")
      .def_property_readonly("num_pressure_evictions",
                             [](Runtime& self) { return without_gil(self, &Runtime::num_pressure_evictions); })
      .def("report", [](Runtime& self) { return describe_report(without_gil(self, &Runtime::report)); })
      .def("reset_report", &Runtime::reset_report, ReleaseGil())
      .def(
          "param_state", [](Runtime& self, ParamId param) { return state_name(self.param_state(param)); }, ReleaseGil())
      .def(
          "chunk_state", [](Runtime& self, ChunkId chunk) { return state_name(self.chunk_state(chunk)); }, ReleaseGil())
      .def(
          "is_on_device", [](Runtime& self, ChunkId chunk, ArrayKind kind) { return self.is_on_device({chunk, kind}); },
          ReleaseGil())
      .def("home", &Runtime::home, ReleaseGil(), "Where the chunk's optimizer states belong between their uses.")
      .def("timeline", [](Runtime& self) { return describe_timeline(without_gil(self, &Runtime::last_timeline)); })
      .def("plan", [](Runtime& self) { return describe_plan(without_gil(self, &Runtime::plan)); })
      .def("plan_problem", [](Runtime& self) { return describe_problem(without_gil(self, &Runtime::plan_problem)); })
      .def("step_times", [](Runtime& self) { return describe_times(without_gil(self, &Runtime::step_times)); })
      .def("predicted_step", [](Runtime& self) {
        const std::optional<SimulatedStep> step = without_gil(self, &Runtime::predicted_step);
        return step ? py::object(describe_step(*step)) : py::none();
      });
}

}  // namespace patrickstar::bind
