#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "bind/bind.h"
#include "bind/python_rules.h"
#include "engine/open_engine.h"
#include "engine/step_course.h"
#include "plan/chunk_bytes.h"
#include "plan/placement.h"

namespace py = pybind11;

namespace patrickstar::bind {

namespace {

void register_layout(py::module_& module) {
  py::class_<ChunkRanks>(module, "ChunkRanks", "Ranks of an engine that share a chunk (chunk/layout.h).")
      .def(py::init<>(), "All ranks of the engine.")
      .def_static("own", &ChunkRanks::own)
      .def_static("groups_of", &ChunkRanks::groups_of, py::arg("size"));
  py::class_<Layout>(module, "Layout", "Chunk and offset of each parameter (chunk/layout.h).")
      .def_static(
          "pack",
          [](const std::vector<int64_t>& numels, const std::vector<DType>& dtypes, const std::vector<bool>& trainable,
             int64_t chunk_numel, int num_ranks, int rank, const std::vector<StateFormat>& states,
             const std::vector<QuantType>& quantization, const std::vector<ChunkRanks>& ranks) {
            std::vector<ParamSpec> params;
            for (size_t i = 0; i < numels.size(); ++i) {
              params.push_back({numels[i], dtypes.at(i), trainable.at(i), states.empty() ? StateFormat{} : states.at(i),
                                quantization.empty() ? QuantType::kNone : quantization.at(i),
                                ranks.empty() ? ChunkRanks() : ranks.at(i)});
            }
            return Layout::pack(params, chunk_numel, {num_ranks, rank});
          },
          py::arg("numels"), py::arg("dtypes"), py::arg("trainable"), py::arg("chunk_numel"), py::arg("num_ranks") = 1,
          py::arg("rank") = 0, py::arg("states") = std::vector<StateFormat>{},
          py::arg("quantization") = std::vector<QuantType>{}, py::arg("ranks") = std::vector<ChunkRanks>{})
      .def_property_readonly("num_chunks", &Layout::num_chunks)
      .def_property_readonly("chunk_numel", &Layout::chunk_numel)
      .def_property_readonly("num_ranks", &Layout::num_ranks)
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
        result["num_ranks"] = chunk.sharding.num_ranks;
        result["dtype"] = chunk.dtype;
        result["trainable"] = chunk.trainable;
        result["states"] = chunk.states;
        result["quantization"] = chunk.quantization;
        result["leading_state"] = chunk.leading_state();
        result["param_bytes"] = chunk.num_bytes(ArrayKind::kParamShard);
        result["resting_tier_bytes"] = resting_tier_bytes(chunk);
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
  py::enum_<StepState>(module, "StepState", "State of an engine's step (engine/step_state.h).")
      .value("READY", StepState::kReady)
      .value("GRADIENTS", StepState::kGradients)
      .value("FORWARD", StepState::kForward)
      .value("EVALUATION", StepState::kEvaluation)
      .value("BACKWARD", StepState::kBackward)
      .value("UPDATING", StepState::kUpdating)
      .value("TORN", StepState::kTorn)
      .value("ENDING", StepState::kEnding);
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
  py::class_<DeviceOptions>(module, "DeviceOptions",
                            "Options shared by the engines of one process (engine/shared_device.h).")
      .def(py::init<>())
      .def_readwrite("cuda_device", &DeviceOptions::cuda_device)
      .def_readwrite("device_limit_bytes", &DeviceOptions::device_limit_bytes)
      .def_readwrite("host_limit_bytes", &DeviceOptions::host_limit_bytes)
      .def_readwrite("limit_rounding_bytes", &DeviceOptions::limit_rounding_bytes)
      .def_readwrite("left_by_activations_bytes", &DeviceOptions::left_by_activations_bytes)
      .def_readwrite("follows_activations", &DeviceOptions::follows_activations)
      .def_readwrite("host_threads", &DeviceOptions::host_threads)
      .def_readwrite("delays", &DeviceOptions::delays);
  py::class_<ResidencyOptions>(module, "ResidencyOptions",
                               "Placement of optimizer states on the device (engine/residency.h).")
      .def(py::init<>())
      .def_readwrite("warmup_payload_ratio", &ResidencyOptions::warmup_payload_ratio)
      .def_readwrite("margin_use_ratio", &ResidencyOptions::margin_use_ratio)
      .def_readwrite("chunk_buffer_limit_bytes", &ResidencyOptions::chunk_buffer_limit_bytes)
      .def_readwrite("state_placement", &ResidencyOptions::state_placement)
      .def_readwrite("backwards", &ResidencyOptions::backwards);
  py::class_<EngineOptions>(module, "EngineOptions")
      .def(py::init<>())
      .def_readwrite("device", &EngineOptions::device)
      .def_readwrite("residency", &EngineOptions::residency)
      .def_readwrite("disk", &EngineOptions::disk)
      .def_readwrite("ample_limit_bytes", &EngineOptions::ample_limit_bytes)
      .def_readwrite("ample_extra_bytes", &EngineOptions::ample_extra_bytes)
      .def_readwrite("update_start", &EngineOptions::update_start)
      .def_readwrite("param_shapes", &EngineOptions::param_shapes)
      .def(
          "set_matrix_rule",
          [](EngineOptions& self, py::function function) { self.matrix_rule = make_matrix_rule(std::move(function)); },
          "Sets function(rows, columns, direction, momentum, master) as the matrix rule (optim/matrix_rule.h).")
      .def(
          "set_compute_format",
          [](EngineOptions& self, py::function function) {
            self.compute_format = make_compute_format(std::move(function));
          },
          "Sets function(shape, dtype, values) as the compute format (optim/compute_format.h).");
}

// Alternatives of GroupOptions (engine/group_options.h).
void register_group_options(py::module_& module) {
  py::enum_<SgdMomentum>(module, "SgdMomentum", "SGD's momentum rule (engine/group_options.h).")
      .value("HEAVY_BALL", SgdMomentum::kHeavyBall)
      .value("NESTEROV", SgdMomentum::kNesterov);
  py::class_<AdamOptions>(module, "AdamOptions", "Options of an Adam or AdamW parameter group in one step.")
      .def(py::init([](double lr, double beta1, double beta2, double eps, double weight_decay, WeightDecay mode,
                       BiasCorrection bias_correction) {
             return AdamOptions{lr, beta1, beta2, eps, weight_decay, mode, bias_correction};
           }),
           py::kw_only(), py::arg("lr"), py::arg("beta1"), py::arg("beta2"), py::arg("eps"), py::arg("weight_decay"),
           py::arg("mode"), py::arg("bias_correction") = BiasCorrection::kApplied);
  py::class_<LionOptions>(module, "LionOptions", "Options of a Lion parameter group in one step.")
      .def(py::init([](double lr, double beta1, double beta2, double weight_decay) {
             return LionOptions{lr, beta1, beta2, weight_decay};
           }),
           py::kw_only(), py::arg("lr"), py::arg("beta1"), py::arg("beta2"), py::arg("weight_decay"));
  py::class_<SgdOptions>(module, "SgdOptions", "Options of a parameter group of SGD with momentum in one step.")
      .def(py::init([](double lr, double momentum, double dampening, double weight_decay, SgdMomentum mode) {
             return SgdOptions{lr, momentum, dampening, weight_decay, mode};
           }),
           py::kw_only(), py::arg("lr"), py::arg("momentum"), py::arg("dampening"), py::arg("weight_decay"),
           py::arg("mode") = SgdMomentum::kHeavyBall);
}

}  // namespace

void register_engine_options(py::module_& module) {
  register_layout(module);
  register_options(module);
  register_group_options(module);
  module.attr("UNLIMITED") = kUnlimited;
  py::enum_<EvictionScope>(module, "EvictionScope", "Chunk buffers to evict from the device (engine/shared_device.h).")
      .value("VALUES", EvictionScope::kValues)
      .value("EVERYTHING", EvictionScope::kEverything);
  module.def("working_set_bytes", &working_set_bytes, py::arg("layout"), py::arg("module_params"),
             "Least device memory for chunk buffers: the largest module's chunks and a gradient (plan/placement.h).");
  module.def(
      "shared_budgets",
      [](int cuda_device) -> std::optional<std::pair<int64_t, int64_t>> {
        const std::shared_ptr<SharedDevice> device = SharedDevice::find(cuda_device);
        if (device == nullptr) return std::nullopt;
        return std::make_pair(device->options().device_limit_bytes, device->options().host_limit_bytes);
      },
      py::arg("cuda_device"), ReleaseGil(),
      "Budgets (device bytes, host bytes) of the engines open on a device; None if there are none.");
  py::class_<Collectives, std::shared_ptr<Collectives>>(module, "Collectives",
                                                        "Communicators of an engine's ranks (engine/collectives.h).")
      .def(py::init<std::shared_ptr<Communicator>, std::shared_ptr<Communicator>, std::shared_ptr<ControlGroup>>(),
           py::arg("gather"), py::arg("scatter"), py::arg("control"))
      .def("check_same_plan", &Collectives::check_same_plan, py::arg("fingerprint"), ReleaseGil())
      .def_property_readonly("num_ranks", &Collectives::num_ranks);
}

}  // namespace patrickstar::bind
