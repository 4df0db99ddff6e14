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

namespace nb = nanobind;

namespace patrickstar::bind {

namespace {

void register_layout(nb::module_& module) {
  nb::class_<ChunkRanks>(module, "ChunkRanks", "Ranks of an engine that share a chunk (chunk/layout.h).")
      .def(nb::init<>(), "All ranks of the engine.")
      .def_static("of_parts", &ChunkRanks::of_parts, nb::arg("count"));
  nb::class_<Layout>(module, "Layout", "Chunk and offset of each parameter (chunk/layout.h).")
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
          nb::arg("numels"), nb::arg("dtypes"), nb::arg("trainable"), nb::arg("chunk_numel"), nb::arg("num_ranks") = 1,
          nb::arg("rank") = 0, nb::arg("states") = std::vector<StateFormat>{},
          nb::arg("quantization") = std::vector<QuantType>{}, nb::arg("ranks") = std::vector<ChunkRanks>{})
      .def_prop_ro("num_chunks", &Layout::num_chunks)
      .def_prop_ro("chunk_numel", &Layout::chunk_numel)
      .def_prop_ro("num_ranks", &Layout::num_ranks)
      .def("placement", [](const Layout& self,
                           ParamId id) { return nb::make_tuple(self.placement(id).chunk, self.placement(id).offset); })
      .def("shard_of",
           [](const Layout& self, ParamId id) {
             const ParamShard shard = self.shard_of(id);
             return nb::make_tuple(shard.begin, shard.numel, shard.offset);
           })
      .def("train", &Layout::train)
      .def("chunk", [](const Layout& self, ChunkId id) {
        const ChunkSpec& chunk = self.chunks().at(static_cast<size_t>(id));
        nb::dict result;
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

void register_options(nb::module_& module) {
  nb::enum_<StatePlacement>(module, "StatePlacement")
      .value("HYBRID", StatePlacement::kHybrid)
      .value("HOST", StatePlacement::kHost);
  nb::enum_<Tracking>(module, "Tracking")
      .value("TRAINING", Tracking::kTraining)
      .value("UNTRACKED", Tracking::kUntracked);
  nb::enum_<Attempt>(module, "Attempt")
      .value("FIRST", Attempt::kFirst)
      .value("AGAIN", Attempt::kAgain)
      .value("LAST", Attempt::kLast)
      .value("ONLY", Attempt::kOnly);
  nb::enum_<StepState>(module, "StepState", "State of an engine's step (engine/step_state.h).")
      .value("READY", StepState::kReady)
      .value("GRADIENTS", StepState::kGradients)
      .value("FORWARD", StepState::kForward)
      .value("EVALUATION", StepState::kEvaluation)
      .value("BACKWARD", StepState::kBackward)
      .value("UPDATING", StepState::kUpdating)
      .value("TORN", StepState::kTorn)
      .value("ENDING", StepState::kEnding);
  nb::enum_<WeightDecay>(module, "WeightDecay")
      .value("L2", WeightDecay::kL2)
      .value("DECOUPLED", WeightDecay::kDecoupled);
  nb::enum_<BiasCorrection>(module, "BiasCorrection")
      .value("APPLIED", BiasCorrection::kApplied)
      .value("NONE", BiasCorrection::kNone);
  nb::class_<DelayOptions>(module, "DelayOptions", "A simulated link, and random delays (backend/delaying_backend.h).")
      .def(nb::init<>())
      .def_rw("bytes_per_second", &DelayOptions::bytes_per_second)
      .def_rw("latency_seconds", &DelayOptions::latency_seconds)
      .def_rw("max_random_seconds", &DelayOptions::max_random_seconds)
      .def_rw("seed", &DelayOptions::seed);
  nb::class_<DeviceOptions>(module, "DeviceOptions",
                            "Options shared by the engines of one process (engine/shared_device.h).")
      .def(nb::init<>())
      .def_rw("cuda_device", &DeviceOptions::cuda_device)
      .def_rw("device_limit_bytes", &DeviceOptions::device_limit_bytes)
      .def_rw("host_limit_bytes", &DeviceOptions::host_limit_bytes)
      .def_rw("limit_rounding_bytes", &DeviceOptions::limit_rounding_bytes)
      .def_rw("left_by_activations_bytes", &DeviceOptions::left_by_activations_bytes)
      .def_rw("follows_activations", &DeviceOptions::follows_activations)
      .def_rw("host_threads", &DeviceOptions::host_threads)
      .def_rw("delays", &DeviceOptions::delays);
  nb::class_<ResidencyOptions>(module, "ResidencyOptions",
                               "Placement of optimizer states on the device (engine/residency.h).")
      .def(nb::init<>())
      .def_rw("warmup_payload_ratio", &ResidencyOptions::warmup_payload_ratio)
      .def_rw("margin_use_ratio", &ResidencyOptions::margin_use_ratio)
      .def_rw("chunk_buffer_limit_bytes", &ResidencyOptions::chunk_buffer_limit_bytes)
      .def_rw("state_placement", &ResidencyOptions::state_placement)
      .def_rw("backwards", &ResidencyOptions::backwards);
  nb::class_<EngineOptions>(module, "EngineOptions")
      .def(nb::init<>())
      .def_rw("device", &EngineOptions::device)
      .def_rw("residency", &EngineOptions::residency)
      .def_rw("disk", &EngineOptions::disk)
      .def_rw("ample_limit_bytes", &EngineOptions::ample_limit_bytes)
      .def_rw("ample_extra_bytes", &EngineOptions::ample_extra_bytes)
      .def_rw("update_start", &EngineOptions::update_start)
      .def_rw("param_shapes", &EngineOptions::param_shapes)
      .def(
          "set_matrix_rule",
          [](EngineOptions& self, nb::callable function) { self.matrix_rule = make_matrix_rule(std::move(function)); },
          "Sets function(rows, columns, direction, momentum, master) as the matrix rule (optim/matrix_rule.h).")
      .def(
          "set_compute_format",
          [](EngineOptions& self, nb::callable function) {
            self.compute_format = make_compute_format(std::move(function));
          },
          "Sets function(shape, dtype, values) as the compute format (optim/compute_format.h).");
}

// Alternatives of GroupOptions (engine/group_options.h).
void register_group_options(nb::module_& module) {
  nb::enum_<SgdMomentum>(module, "SgdMomentum", "SGD's momentum rule (engine/group_options.h).")
      .value("HEAVY_BALL", SgdMomentum::kHeavyBall)
      .value("NESTEROV", SgdMomentum::kNesterov);
  nb::class_<AdamOptions>(module, "AdamOptions", "Options of an Adam or AdamW parameter group in one step.")
      .def(
          "__init__",
          [](AdamOptions* self, double lr, double beta1, double beta2, double eps, double weight_decay,
             WeightDecay mode, BiasCorrection bias_correction) {
            new (self) AdamOptions{lr, beta1, beta2, eps, weight_decay, mode, bias_correction};
          },
          nb::kw_only(), nb::arg("lr"), nb::arg("beta1"), nb::arg("beta2"), nb::arg("eps"), nb::arg("weight_decay"),
          nb::arg("mode"), nb::arg("bias_correction") = BiasCorrection::kApplied);
  nb::class_<LionOptions>(module, "LionOptions", "Options of a Lion parameter group in one step.")
      .def(
          "__init__",
          [](LionOptions* self, double lr, double beta1, double beta2, double weight_decay) {
            new (self) LionOptions{lr, beta1, beta2, weight_decay};
          },
          nb::kw_only(), nb::arg("lr"), nb::arg("beta1"), nb::arg("beta2"), nb::arg("weight_decay"));
  nb::class_<SgdOptions>(module, "SgdOptions", "Options of a parameter group of SGD with momentum in one step.")
      .def(
          "__init__",
          [](SgdOptions* self, double lr, double momentum, double dampening, double weight_decay, SgdMomentum mode) {
            new (self) SgdOptions{lr, momentum, dampening, weight_decay, mode};
          },
          nb::kw_only(), nb::arg("lr"), nb::arg("momentum"), nb::arg("dampening"), nb::arg("weight_decay"),
          nb::arg("mode") = SgdMomentum::kHeavyBall);
}

}  // namespace

void register_engine_options(nb::module_& module) {
  register_layout(module);
  register_options(module);
  register_group_options(module);
  module.attr("UNLIMITED") = kUnlimited;
  nb::enum_<EvictionScope>(module, "EvictionScope", "Chunk buffers to evict from the device (engine/shared_device.h).")
      .value("VALUES", EvictionScope::kValues)
      .value("EVERYTHING", EvictionScope::kEverything);
  module.def("working_set_bytes", &working_set_bytes, nb::arg("layout"), nb::arg("module_params"),
             "Least device memory for chunk buffers: the largest module's chunks and a gradient (plan/placement.h).");
  module.def(
      "shared_budgets",
      [](int cuda_device) -> std::optional<std::pair<int64_t, int64_t>> {
        const std::shared_ptr<SharedDevice> device = SharedDevice::find(cuda_device);
        if (device == nullptr) return std::nullopt;
        return std::make_pair(device->options().device_limit_bytes, device->options().host_limit_bytes);
      },
      nb::arg("cuda_device"), ReleaseGil(),
      "Budgets (device bytes, host bytes) of the engines open on a device; None if there are none.");
  nb::class_<Collectives>(module, "Collectives", "Communicators of an engine's ranks (engine/collectives.h).")
      .def(init_shared<Collectives, std::shared_ptr<Communicator>, std::shared_ptr<Communicator>,
                       std::shared_ptr<ControlGroup>, std::shared_ptr<Communicator>, std::shared_ptr<Communicator>>(),
           nb::arg("gather"), nb::arg("scatter"), nb::arg("control"), nb::arg("part_gather") = nb::none(),
           nb::arg("part_scatter") = nb::none())
      .def("check_same_plan", &Collectives::check_same_plan, nb::arg("fingerprint"), ReleaseGil())
      .def_prop_ro("num_ranks", &Collectives::num_ranks);
}

}  // namespace patrickstar::bind
