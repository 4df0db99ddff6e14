#include <algorithm>
#include <array>
#include <initializer_list>
#include <optional>
#include <string>

#include "bind/bind.h"
#include "bind/kernel_arguments.h"
#include "common/check.h"

namespace nb = nanobind;

namespace patrickstar::bind {

namespace {

// Master, momentum and variance.
using NewStates = std::optional<std::array<StateArray, 3>>;

void check_state(const char* name, const StateArray& array, std::initializer_list<StateType> types) {
  PS_CHECK(std::find(types.begin(), types.end(), array.type) != types.end(), ArgumentError, name,
           " cannot be of this StateType (", static_cast<int>(array.type),
           "); optim/kernels.h lists those it can be of");
  PS_CHECK(array.data != 0 || array.type == StateType::kNone, ArgumentError, name,
           " is null; only param may be 0 (no compute copy), and a state of StateType.NONE");
  PS_CHECK((array.scales != 0) == is_8_bit(array.type), ArgumentError, name, " has ", array.scales == 0 ? "no " : "",
           "scales, which states of 8 bits alone have; give their address with those, and 0 with others");
}

void check_range(const optim::AdamRange& range) {
  PS_CHECK(range.grad != nullptr, ArgumentError, "grad is null; only param may be 0 (no compute copy)");
  PS_CHECK(
      range.master_type == StateType::kFloat32 ||
          (range.param != nullptr && range.param != range.grad && range.param_dtype == DType::kBFloat16),
      ArgumentError,
      "param must be bfloat16 and apart from grad where the master is not of float32: it is part of the state; give "
      "it memory of its own, or a float32 master");
  PS_CHECK(range.param != range.grad || element_size(range.param_dtype) == element_size(range.grad_dtype),
           ArgumentError, "param has the address of grad, but elements of ", element_size(range.param_dtype),
           " bytes where grad's have ", element_size(range.grad_dtype), "; give param memory of its own");
}

optim::AdamRange make_range(const StateArray& master, const StateArray& momentum, const StateArray& variance,
                            Address grad, DType grad_dtype, Address param, DType param_dtype, int64_t numel,
                            const OptionalKey& key, const NewStates& new_states) {
  optim::AdamRange range{};
  range.master = pointer<void>(master.data);
  range.momentum = pointer<void>(momentum.data);
  range.variance = pointer<void>(variance.data);
  range.grad = pointer<const void>(grad);
  range.param = pointer<void>(param);
  range.grad_dtype = grad_dtype;
  range.param_dtype = param_dtype;
  range.numel = numel;
  range.master_type = master.type;
  range.momentum_type = momentum.type;
  range.variance_type = variance.type;
  range.momentum_scales = pointer<float>(momentum.scales);
  range.variance_scales = pointer<float>(variance.scales);
  range.key = key.value_or(optim::RandomKey{});
  if (new_states) {
    range.new_master = pointer<float>((*new_states)[0].data);
    range.new_momentum = pointer<void>((*new_states)[1].data);
    range.new_variance = pointer<void>((*new_states)[2].data);
    range.new_momentum_scales = pointer<float>((*new_states)[1].scales);
    range.new_variance_scales = pointer<float>((*new_states)[2].scales);
  }
  if (numel == 0) return range;
  check_state("master", master, {StateType::kFloat32, StateType::kLowerHalf, StateType::kNone});
  check_state("momentum", momentum, {StateType::kFloat32, StateType::kBFloat16, StateType::kSigned8});
  check_state("variance", variance,
              {StateType::kFloat32, StateType::kBFloat16, StateType::kUnsigned8, StateType::kNone});
  if (new_states) {
    check_state("new master", (*new_states)[0], {StateType::kFloat32});
    check_state("new momentum", (*new_states)[1], {momentum.type});
    check_state("new variance", (*new_states)[2], {variance.type});
    PS_CHECK(master.type == StateType::kFloat32, ArgumentError, "new states need a float32 master; give one");
  }
  check_range(range);
  return range;
}

void register_range(nb::module_& module) {
  nb::class_<StateArray>(module, "StateArray",
                         "An optimizer state: type, address, and address of its scales (8-bit states only; "
                         "common/dtype.h). A bare address means float32.")
      .def(
          "__init__",
          [](StateArray* self, Address data, StateType type, Address scales) {
            new (self) StateArray{type, data, scales};
          },
          nb::arg("data"), nb::arg("type") = StateType::kFloat32, nb::arg("scales") = 0);
  nb::implicitly_convertible<nb::int_, StateArray>();
  nb::class_<optim::RandomKey>(module, "RandomKey", "Key of the random bits for stochastic rounding (optim/kernels.h).")
      .def(
          "__init__",
          [](optim::RandomKey* self, uint32_t a, uint32_t b, int64_t first) {
            new (self) optim::RandomKey{a, b, first};
          },
          nb::arg("a") = 0, nb::arg("b") = 0, nb::arg("first") = 0)
      .def("__repr__",
           [](const optim::RandomKey& key) {
             return "optim.RandomKey(" + std::to_string(key.a) + ", " + std::to_string(key.b) + ", " +
                    std::to_string(key.first) + ")";
           })
      .def_ro("a", &optim::RandomKey::a)
      .def_ro("b", &optim::RandomKey::b)
      .def_ro("first", &optim::RandomKey::first);
  module.def("random_key", &optim::random_key,
             "Key of one step and parameter, for a range that starts at its element first.", nb::arg("seed"),
             nb::arg("step"), nb::arg("param"), nb::arg("first"));
  nb::class_<optim::AdamRange>(
      module, "AdamRange",
      "Arrays of one update at raw addresses (optim/kernels.h). Optimizers without a variance have one of "
      "StateType.NONE. param may be grad, or 0. With new_states (master, momentum, variance) the old ones stay. Raises "
      "ValueError for null arrays, or a param over a grad of another size.")
      .def(
          "__init__",
          [](optim::AdamRange* self, const StateArray& master, const StateArray& momentum, const StateArray& variance,
             Address grad, DType grad_dtype, Address param, DType param_dtype, int64_t numel, const OptionalKey& key,
             const NewStates& new_states) {
            new (self) optim::AdamRange(
                make_range(master, momentum, variance, grad, grad_dtype, param, param_dtype, numel, key, new_states));
          },
          nb::arg("master"), nb::arg("momentum"), nb::arg("variance"), nb::arg("grad"), nb::arg("grad_dtype"),
          nb::arg("param"), nb::arg("param_dtype"), nb::arg("numel"), nb::kw_only(), nb::arg("key") = nb::none(),
          nb::arg("new_states") = nb::none());
}

void register_scalars(nb::module_& module) {
  nb::class_<optim::AdamScalars>(module, "AdamScalars", "Scalars of one Adam step (optim/kernels.h).")
      .def(
          "__init__",
          [](optim::AdamScalars* self, float grad_scale, float weight_decay, float decay, float beta2,
             float one_minus_beta1, float one_minus_beta2, float inv_sqrt_bias_correction2, float eps,
             float step_size) {
            new (self) optim::AdamScalars{
                grad_scale, weight_decay, decay, beta2, one_minus_beta1, one_minus_beta2, inv_sqrt_bias_correction2,
                eps,        step_size};
          },
          nb::kw_only(), nb::arg("grad_scale"), nb::arg("weight_decay"), nb::arg("decay"), nb::arg("beta2"),
          nb::arg("one_minus_beta1"), nb::arg("one_minus_beta2"), nb::arg("inv_sqrt_bias_correction2"), nb::arg("eps"),
          nb::arg("step_size"));
  nb::class_<optim::MomentumScalars>(
      module, "MomentumScalars",
      "Scalars of one step of Lion or SGD (optim/kernels.h); those of other rules are not read.")
      .def(
          "__init__",
          [](optim::MomentumScalars* self, optim::MomentumRule rule, float grad_scale, float weight_decay, float decay,
             float step_size, float one_minus_beta1, float one_minus_beta2, float momentum_factor,
             float one_minus_dampening) {
            new (self) optim::MomentumScalars{rule,
                                              grad_scale,
                                              weight_decay,
                                              decay,
                                              step_size,
                                              one_minus_beta1,
                                              one_minus_beta2,
                                              momentum_factor,
                                              one_minus_dampening};
          },
          nb::arg("rule"), nb::kw_only(), nb::arg("grad_scale"), nb::arg("weight_decay"), nb::arg("decay"),
          nb::arg("step_size"), nb::arg("one_minus_beta1") = 0.0f, nb::arg("one_minus_beta2") = 0.0f,
          nb::arg("momentum_factor") = 0.0f, nb::arg("one_minus_dampening") = 0.0f);
}

}  // namespace

void register_momentum_rule(nb::module_& module) {
  nb::enum_<optim::MomentumRule>(module, "MomentumRule", "Optimizers with momentum and no variance (optim/kernels.h).")
      .value("LION", optim::MomentumRule::kLion)
      .value("SGD", optim::MomentumRule::kSgd)
      .value("NESTEROV", optim::MomentumRule::kNesterov);
}

void register_update_arguments(nb::module_& module) {
  register_range(module);
  register_scalars(module);
}

}  // namespace patrickstar::bind
