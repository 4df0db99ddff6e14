#include <vector>

#include "bind/bind.h"
#include "chunk/chunk_store.h"
#include "chunk/layout.h"
#include "common/ablation.h"
#include "common/check.h"
#include "common/dtype.h"
#include "common/types.h"

namespace nb = nanobind;

namespace patrickstar::bind {

namespace {

State parse_state(const std::string& name) {
  for (int state = 0; state <= static_cast<int>(State::kReleased); ++state) {
    if (name == state_name(static_cast<State>(state))) return static_cast<State>(state);
  }
  throw ArgumentError("there is no state " + name);
}

void register_ablation(nb::module_& module) {
  nb::enum_<Mechanism>(module, "Mechanism", "Mechanisms that an ablation can switch off (common/ablation.h).")
      .value("WHOLE_UPDATES_AHEAD", Mechanism::kWholeUpdatesAhead)
      .value("TWO_PHASE_UPDATES", Mechanism::kTwoPhaseUpdates)
      .value("SCALE_INDEPENDENT_VALUES", Mechanism::kScaleIndependentValues)
      .value("DEFERRED_UPDATES", Mechanism::kDeferredUpdates)
      .value("ORDER_OF_NEED", Mechanism::kOrderOfNeed)
      .value("RESTING_TIERS_IN_TURN", Mechanism::kRestingTiersInTurn)
      .value("ROUND_TRIPS", Mechanism::kRoundTrips)
      .value("RARE_SIZES", Mechanism::kRareSizes)
      .value("EXACT_DEVICE_BUFFERS", Mechanism::kExactDeviceBuffers);
  module.def(
      "leave_out",
      [](const std::vector<Mechanism>& mechanisms) {
        uint32_t bits = 0;
        for (Mechanism mechanism : mechanisms) bits |= uint32_t{1} << static_cast<uint32_t>(mechanism);
        set_left_out(bits);
      },
      nb::arg("mechanisms"), "Switches these mechanisms off in engines built from now on, and all others on.");
}

}  // namespace

void register_types(nb::module_& module) {
  nb::enum_<DType>(module, "DType", "Element type of a chunk's arrays.")
      .value("FLOAT32", DType::kFloat32)
      .value("BFLOAT16", DType::kBFloat16)
      .value("FLOAT16", DType::kFloat16);
  nb::enum_<StateType>(module, "StateType", "Element type of an optimizer state (common/dtype.h).")
      .value("FLOAT32", StateType::kFloat32)
      .value("LOWER_HALF", StateType::kLowerHalf)
      .value("BFLOAT16", StateType::kBFloat16)
      .value("SIGNED8", StateType::kSigned8)
      .value("UNSIGNED8", StateType::kUnsigned8)
      .value("NONE", StateType::kNone);
  nb::enum_<GradientPlace>(module, "GradientPlace", "Where a gradient waits for the step (chunk/layout.h).")
      .value("OF_PARAM", GradientPlace::kOfParam)
      .value("OWN", GradientPlace::kOwn);
  nb::class_<StateFormat>(module, "StateFormat", "The types of a parameter's optimizer states (chunk/layout.h).")
      .def(
          "__init__",
          [](StateFormat* self, StateType master, StateType momentum, StateType variance, GradientPlace gradient) {
            new (self) StateFormat{master, momentum, variance, gradient};
          },
          nb::arg("master") = StateType::kFloat32, nb::arg("momentum") = StateType::kFloat32,
          nb::arg("variance") = StateType::kFloat32, nb::arg("gradient") = GradientPlace::kOfParam)
      .def_ro("master", &StateFormat::master)
      .def_ro("momentum", &StateFormat::momentum)
      .def_ro("variance", &StateFormat::variance)
      .def_ro("gradient", &StateFormat::gradient);
  nb::enum_<ArrayKind>(module, "ArrayKind", "The arrays of a chunk (common/types.h).")
      .value("PARAM", ArrayKind::kParam)
      .value("GRAD", ArrayKind::kGrad)
      .value("GRAD_SUM", ArrayKind::kGradSum)
      .value("PARAM_SHARD", ArrayKind::kParamShard)
      .value("GRAD_SHARD", ArrayKind::kGradShard)
      .value("MASTER", ArrayKind::kMaster)
      .value("MOMENTUM", ArrayKind::kMomentum)
      .value("VARIANCE", ArrayKind::kVariance)
      .value("QUANTIZED", ArrayKind::kQuantized);
  nb::enum_<QuantType>(module, "QuantType", "How the values of a frozen parameter are stored (common/quantized.h).")
      .value("NONE", QuantType::kNone)
      .value("NF4", QuantType::kNf4)
      .value("INT8", QuantType::kInt8);
  nb::enum_<Tier>(module, "Tier", "Memory tier.")
      .value("HOST", Tier::kHost)
      .value("DEVICE", Tier::kDevice)
      .value("DISK", Tier::kDisk);
  register_ablation(module);
  module.def("state_bytes", &state_bytes, nb::arg("type"), nb::arg("numel"),
             "Bytes of an optimizer state of numel elements, block scales included (common/dtype.h).");
  module.def(
      "check_transition",
      [](const std::string& from, const std::string& to) {
        check_transition(parse_state(from), parse_state(to), "a parameter");
      },
      "Raises StateError for a forbidden transition of a parameter (chunk/chunk_store.h).");
}

}  // namespace patrickstar::bind
