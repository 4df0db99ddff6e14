#include <array>
#include <cstddef>
#include <iterator>
#include <string>

#include "bind/bind.h"
#include "bind/kernel_arguments.h"
#include "common/check.h"
#ifdef PATRICKSTAR_WITH_CUDA
#include "optim/cuda_kernels.h"
#endif

namespace nb = nanobind;

namespace patrickstar::bind {

namespace {

struct MomentumField {
  const char* name;
  float optim::MomentumScalars::* member;
};
constexpr MomentumField kMomentumFields[] = {
    {"grad_scale", &optim::MomentumScalars::grad_scale},
    {"weight_decay", &optim::MomentumScalars::weight_decay},
    {"decay", &optim::MomentumScalars::decay},
    {"step_size", &optim::MomentumScalars::step_size},
};
constexpr MomentumField kLionFields[] = {
    {"one_minus_beta1", &optim::MomentumScalars::one_minus_beta1},
    {"one_minus_beta2", &optim::MomentumScalars::one_minus_beta2},
};
constexpr MomentumField kSgdFields[] = {
    {"momentum_factor", &optim::MomentumScalars::momentum_factor},
    {"one_minus_dampening", &optim::MomentumScalars::one_minus_dampening},
};

optim::MomentumScalars momentum_scalars_of(optim::MomentumRule rule, const nb::kwargs& kwargs) {
  optim::MomentumScalars scalars{};
  scalars.rule = rule;
  size_t taken = 0;
  const auto take = [&](const auto& fields) {
    for (const MomentumField& field : fields) {
      PS_CHECK(kwargs.contains(field.name), ArgumentError, "momentum_step got no ", field.name,
               "; pass all fields of MomentumScalars that this rule reads");
      scalars.*field.member = nb::cast<float>(kwargs[field.name]);
    }
    taken += std::size(fields);
  };
  take(kMomentumFields);
  rule == optim::MomentumRule::kLion ? take(kLionFields) : take(kSgdFields);
  PS_CHECK(kwargs.size() == taken, ArgumentError, "momentum_step got ", kwargs.size(),
           " keyword arguments, this rule reads ", taken, " fields of MomentumScalars; remove the others");
  return scalars;
}

AdamArrays arrays_of(const StateArray& master, const StateArray& momentum, Address grad, DType grad_dtype,
                     Address param, DType param_dtype, int64_t numel, const OptionalKey& key) {
  const AdamArrays arrays{master, momentum,   {StateType::kNone}, grad,
                          param,  grad_dtype, param_dtype,        key.value_or(optim::RandomKey{})};
  check_arrays(arrays, numel, {StateType::kNone});
  return arrays;
}

// momentum_step, or the pass that writes params only.
using MomentumKernel = void (*optim::CpuKernels::*)(const optim::AdamRange& range,
                                                    const optim::MomentumScalars& scalars);

void register_step(nb::module_& module, const char* name, MomentumKernel kernel, const char* doc) {
  module.def(
      name,
      [kernel](const std::string& isa, optim::MomentumRule rule, const StateArray& master, const StateArray& momentum,
               Address grad, DType grad_dtype, Address param, DType param_dtype, int64_t numel, int num_threads,
               const OptionalKey& key, const nb::kwargs& scalars_by_name) {
        const AdamArrays arrays = arrays_of(master, momentum, grad, grad_dtype, param, param_dtype, numel, key);
        const optim::MomentumScalars scalars = momentum_scalars_of(rule, scalars_by_name);
        const auto update = kernels_of(isa).*kernel;
        if (kernel == &optim::CpuKernels::momentum_param) check_whole_master(arrays);
        const nb::gil_scoped_release release;
        split(num_threads, numel, [&](int64_t begin, int64_t size) { update(arrays.range(begin, size), scalars); });
      },
      doc, nb::arg("isa"), nb::arg("rule"), nb::arg("master"), nb::arg("momentum"), nb::arg("grad"),
      nb::arg("grad_dtype"), nb::arg("param"), nb::arg("param_dtype"), nb::arg("numel"), nb::arg("num_threads"),
      nb::kw_only(), nb::arg("key") = nb::none(), nb::arg("scalars"));
}

void register_apart(nb::module_& module) {
  module.def(
      "momentum_apart",
      [](const std::string& isa, optim::MomentumRule rule, const StateArray& master, const StateArray& momentum,
         Address grad, DType grad_dtype, Address param, DType param_dtype, int64_t numel, int num_threads,
         const std::array<StateArray, 2>& new_states, const OptionalKey& key, const nb::kwargs& scalars_by_name) {
        const AdamArrays arrays = arrays_of(master, momentum, grad, grad_dtype, param, param_dtype, numel, key);
        const optim::MomentumScalars scalars = momentum_scalars_of(rule, scalars_by_name);
        const optim::CpuKernels& kernels = kernels_of(isa);
        check_whole_master(arrays);
        const auto& [new_master, new_momentum] = new_states;
        if (numel > 0) {
          check_state("new master", new_master, {master.type});
          check_state("new momentum", new_momentum, {momentum.type});
        }
        const nb::gil_scoped_release release;
        split(num_threads, numel, [&](int64_t begin, int64_t size) {
          optim::AdamRange range = arrays.range(begin, size);
          range.new_master = static_cast<float*>(new_states[0].at(begin));
          range.new_momentum = new_states[1].at(begin);
          range.new_momentum_scales = new_states[1].scales_at(begin);
          kernels.momentum_step(range, scalars);
        });
      },
      "Like momentum_step, but writes the new master and momentum to new_states and keeps the old ones.",
      nb::arg("isa"), nb::arg("rule"), nb::arg("master"), nb::arg("momentum"), nb::arg("grad"), nb::arg("grad_dtype"),
      nb::arg("param"), nb::arg("param_dtype"), nb::arg("numel"), nb::arg("num_threads"), nb::arg("new_states"),
      nb::kw_only(), nb::arg("key") = nb::none(), nb::arg("scalars"));
}

// Speculative updates with scale-independent values (optim/kernels.h).
void register_scale_independent(nb::module_& module) {
  module.def(
      "momentum_param_between",
      [](const std::string& isa, optim::MomentumRule rule, const StateArray& master, const StateArray& momentum,
         Address grad, DType grad_dtype, Address param, DType param_dtype, int64_t numel, int num_threads,
         float most_grad_scale, Address logs, const nb::kwargs& scalars_by_name) {
        const AdamArrays arrays = arrays_of(master, momentum, grad, grad_dtype, param, param_dtype, numel, {});
        const optim::MomentumScalars scalars = momentum_scalars_of(rule, scalars_by_name);
        const optim::CpuKernels& kernels = kernels_of(isa);
        check_half(grad_dtype, param_dtype);
        check_whole_master(arrays);
        const nb::gil_scoped_release release;
        split_into_pieces(num_threads, numel, [&](int64_t piece, int64_t begin, int64_t size) {
          ScaleDependentLog& log = pointer<ScaleDependentLog>(logs)[piece];
          optim::ScaleDependentValues dependent = log.values();
          kernels.momentum_param_between(arrays.range(begin, size), scalars, most_grad_scale, &dependent);
          log.count = dependent.count;
        });
      },
      "Like adam_param_between, for momentum_param.", nb::arg("isa"), nb::arg("rule"), nb::arg("master"),
      nb::arg("momentum"), nb::arg("grad"), nb::arg("grad_dtype"), nb::arg("param"), nb::arg("param_dtype"),
      nb::arg("numel"), nb::arg("num_threads"), nb::arg("most_grad_scale"), nb::arg("logs"), nb::arg("scalars"));
  module.def(
      "momentum_param_scale_dependent",
      [](const std::string& isa, optim::MomentumRule rule, const StateArray& master, const StateArray& momentum,
         Address grad, DType grad_dtype, Address param, DType param_dtype, int64_t numel, int num_threads, Address logs,
         const nb::kwargs& scalars_by_name) {
        const AdamArrays arrays = arrays_of(master, momentum, grad, grad_dtype, param, param_dtype, numel, {});
        const optim::MomentumScalars scalars = momentum_scalars_of(rule, scalars_by_name);
        const optim::CpuKernels& kernels = kernels_of(isa);
        check_half(grad_dtype, param_dtype);
        check_whole_master(arrays);
        const nb::gil_scoped_release release;
        split_into_pieces(num_threads, numel, [&](int64_t piece, int64_t begin, int64_t size) {
          kernels.momentum_param_scale_dependent(arrays.range(begin, size), scalars,
                                                 pointer<ScaleDependentLog>(logs)[piece].values());
        });
      },
      "Like momentum_param, for the values that momentum_param_between logged.", nb::arg("isa"), nb::arg("rule"),
      nb::arg("master"), nb::arg("momentum"), nb::arg("grad"), nb::arg("grad_dtype"), nb::arg("param"),
      nb::arg("param_dtype"), nb::arg("numel"), nb::arg("num_threads"), nb::arg("logs"), nb::arg("scalars"));
}

#ifdef PATRICKSTAR_WITH_CUDA
void register_cuda_step(nb::module_& module) {
  module.def(
      "cuda_momentum_step",
      [](optim::MomentumRule rule, const StateArray& master, const StateArray& momentum, Address grad, DType grad_dtype,
         Address param, DType param_dtype, int64_t numel, Address stream, const OptionalKey& key,
         const nb::kwargs& scalars_by_name) {
        const AdamArrays arrays = arrays_of(master, momentum, grad, grad_dtype, param, param_dtype, numel, key);
        const optim::MomentumScalars scalars = momentum_scalars_of(rule, scalars_by_name);
        const nb::gil_scoped_release release;
        optim::cuda::momentum_step(arrays.range(0, numel), scalars, reinterpret_cast<cudaStream_t>(stream));
      },
      "Like momentum_step.", nb::arg("rule"), nb::arg("master"), nb::arg("momentum"), nb::arg("grad"),
      nb::arg("grad_dtype"), nb::arg("param"), nb::arg("param_dtype"), nb::arg("numel"), nb::arg("stream"),
      nb::kw_only(), nb::arg("key") = nb::none(), nb::arg("scalars"));
}
#endif

}  // namespace

void register_momentum_rule(nb::module_& module) {
  nb::enum_<optim::MomentumRule>(module, "MomentumRule", "Optimizers with momentum and no variance (optim/kernels.h).")
      .value("LION", optim::MomentumRule::kLion)
      .value("SGD", optim::MomentumRule::kSgd)
      .value("NESTEROV", optim::MomentumRule::kNesterov);
}

void register_momentum_kernels(nb::module_& module) {
  register_step(module, "momentum_step", &optim::CpuKernels::momentum_step,
                "One step of Lion or SGD with momentum, with arrays as for adam. Keyword arguments: all fields of "
                "MomentumScalars that the rule reads. Raises ValueError as adam does.");
  register_step(module, "momentum_param", &optim::CpuKernels::momentum_param,
                "Like momentum_step, but writes param only, in memory apart from grad. Requires a float32 master.");
  register_apart(module);
  register_scale_independent(module);
#ifdef PATRICKSTAR_WITH_CUDA
  register_cuda_step(module);
#endif
}

}  // namespace patrickstar::bind
