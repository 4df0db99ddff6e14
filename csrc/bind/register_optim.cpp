#include <array>
#include <iterator>
#include <string>
#include <variant>
#include <vector>

#include "bind/adam_scalars.h"
#include "bind/bind.h"
#include "bind/kernel_arguments.h"
#include "common/check.h"
#include "optim/wide_sum.h"

namespace nb = nanobind;

namespace patrickstar::bind {

namespace {

using AdamKernel = void (*optim::CpuKernels::*)(const optim::AdamRange& range, const optim::AdamScalars& scalars);

void register_adam(nb::module_& module, const char* name, AdamKernel kernel, const char* doc) {
  module.def(
      name,
      [kernel](const std::string& isa, const StateArray& master, const StateArray& momentum, const StateArray& variance,
               Address grad, DType grad_dtype, Address param, DType param_dtype, int64_t numel, Threads threads,
               const OptionalKey& key, const nb::kwargs& scalars_by_name) {
        const AdamArrays arrays{master, momentum,   variance,    grad,
                                param,  grad_dtype, param_dtype, key.value_or(optim::RandomKey{})};
        const optim::AdamScalars scalars = scalars_of(scalars_by_name);
        const auto update = kernels_of(isa).*kernel;
        check_arrays(arrays, numel);
        if (kernel == &optim::CpuKernels::adam_param) check_whole_master(arrays);
        const auto part = [&](int64_t begin, int64_t size) { update(arrays.range(begin, size), scalars); };
        const nb::gil_scoped_release release;
        if (ThreadPool* const* pool = std::get_if<ThreadPool*>(&threads)) return split(**pool, numel, part);
        split(std::get<int>(threads), numel, part);
      },
      doc, nb::arg("isa"), nb::arg("master"), nb::arg("momentum"), nb::arg("variance"), nb::arg("grad"),
      nb::arg("grad_dtype"), nb::arg("param"), nb::arg("param_dtype"), nb::arg("numel"), nb::arg("threads"),
      nb::kw_only(), nb::arg("key") = nb::none(), nb::arg("scalars"));
}

// Speculative updates with scale-independent values (optim/kernels.h).
void register_scale_independent_values(nb::module_& module) {
  module.def(
      "adam_param_between",
      [](const std::string& isa, const StateArray& master, const StateArray& momentum, const StateArray& variance,
         Address grad, DType grad_dtype, Address param, DType param_dtype, int64_t numel, int num_threads,
         float most_grad_scale, Address logs, const nb::kwargs& scalars_by_name) {
        const AdamArrays arrays{master, momentum, variance, grad, param, grad_dtype, param_dtype};
        const optim::AdamScalars scalars = scalars_of(scalars_by_name);
        const optim::CpuKernels& kernels = kernels_of(isa);
        check_arrays(arrays, numel);
        check_half(grad_dtype, param_dtype);
        check_whole_master(arrays);
        const nb::gil_scoped_release release;
        split_into_pieces(num_threads, numel, [&](int64_t piece, int64_t begin, int64_t size) {
          ScaleDependentLog& log = pointer<ScaleDependentLog>(logs)[piece];
          optim::ScaleDependentValues dependent = log.values();
          kernels.adam_param_between(arrays.range(begin, size), scalars, most_grad_scale, &dependent);
          log.count = dependent.count;
        });
      },
      "Writes the 16-bit values that are the same for every grad_scale up to most_grad_scale. Scale-dependent values "
      "go to logs of OPEN_LOG_BYTES per SCALE_DEPENDENT_PIECE elements (optim/kernels.h).",
      nb::arg("isa"), nb::arg("master"), nb::arg("momentum"), nb::arg("variance"), nb::arg("grad"),
      nb::arg("grad_dtype"), nb::arg("param"), nb::arg("param_dtype"), nb::arg("numel"), nb::arg("num_threads"),
      nb::arg("most_grad_scale"), nb::arg("logs"), nb::arg("scalars"));
  module.def(
      "adam_param_scale_dependent",
      [](const std::string& isa, const StateArray& master, const StateArray& momentum, const StateArray& variance,
         Address grad, DType grad_dtype, Address param, DType param_dtype, int64_t numel, int num_threads, Address logs,
         const nb::kwargs& scalars_by_name) {
        const AdamArrays arrays{master, momentum, variance, grad, param, grad_dtype, param_dtype};
        const optim::AdamScalars scalars = scalars_of(scalars_by_name);
        const optim::CpuKernels& kernels = kernels_of(isa);
        check_arrays(arrays, numel);
        check_half(grad_dtype, param_dtype);
        check_whole_master(arrays);
        const nb::gil_scoped_release release;
        split_into_pieces(num_threads, numel, [&](int64_t piece, int64_t begin, int64_t size) {
          kernels.adam_param_scale_dependent(arrays.range(begin, size), scalars,
                                             pointer<ScaleDependentLog>(logs)[piece].values());
        });
      },
      "Like adam_param, for the values that adam_param_between logged.", nb::arg("isa"), nb::arg("master"),
      nb::arg("momentum"), nb::arg("variance"), nb::arg("grad"), nb::arg("grad_dtype"), nb::arg("param"),
      nb::arg("param_dtype"), nb::arg("numel"), nb::arg("num_threads"), nb::arg("logs"), nb::arg("scalars"));
}

void register_split_masters(nb::module_& module) {
  module.def(
      "adam_split",
      [](const std::string& isa, Address lower, Address momentum, Address variance, Address grad, DType grad_dtype,
         Address param, int64_t numel, int num_threads, const nb::kwargs& scalars_by_name) {
        const AdamArrays arrays{{StateType::kLowerHalf, lower},
                                {StateType::kFloat32, momentum},
                                {StateType::kFloat32, variance},
                                grad,
                                param,
                                grad_dtype,
                                DType::kBFloat16};
        const optim::AdamScalars scalars = scalars_of(scalars_by_name);
        const optim::CpuKernels& kernels = kernels_of(isa);
        check_arrays(arrays, numel);
        const nb::gil_scoped_release release;
        split(num_threads, numel,
              [&](int64_t begin, int64_t size) { kernels.adam(arrays.range(begin, size), scalars); });
      },
      "Like adam, for masters split into bfloat16 params, 16-bit lower halves and signs of the variance "
      "(optim/kernels.h).",
      nb::arg("isa"), nb::arg("lower"), nb::arg("momentum"), nb::arg("variance"), nb::arg("grad"),
      nb::arg("grad_dtype"), nb::arg("param"), nb::arg("numel"), nb::arg("num_threads"), nb::arg("scalars"));
  module.def(
      "split_master",
      [](const std::string& isa, Address master, Address param, Address lower, Address variance, int64_t numel) {
        kernels_of(isa).split_master(pointer<const float>(master), pointer<uint16_t>(param), pointer<uint16_t>(lower),
                                     pointer<float>(variance), numel);
      },
      "Splits float32 masters into bfloat16 params, 16-bit lower halves and signs of the variance.", nb::arg("isa"),
      nb::arg("master"), nb::arg("param"), nb::arg("lower"), nb::arg("variance"), nb::arg("numel"), ReleaseGil());
  module.def(
      "join_master",
      [](const std::string& isa, Address param, Address lower, Address variance, Address master, int64_t numel) {
        kernels_of(isa).join_master(pointer<const uint16_t>(param), pointer<const uint16_t>(lower),
                                    pointer<const float>(variance), pointer<float>(master), numel);
      },
      "Inverse of split_master.", nb::arg("isa"), nb::arg("param"), nb::arg("lower"), nb::arg("variance"),
      nb::arg("master"), nb::arg("numel"), ReleaseGil());
}

// Optimizer states of 16 and 8 bits.
void register_states(nb::module_& module) {
  module.attr("STATE_BLOCK") = kStateBlock;
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
  module.def(
      "expand_state",
      [](const std::string& isa, const StateArray& state, Address out, int64_t numel) {
        kernels_of(isa).expand_state(state.type, state.at(0), state.scales_at(0), pointer<float>(out), numel);
      },
      "Converts a state to float32.", nb::arg("isa"), nb::arg("state"), nb::arg("out"), nb::arg("numel"), ReleaseGil());
  module.def(
      "compress_state",
      [](const std::string& isa, Address in, const StateArray& state, int64_t numel, const OptionalKey& key) {
        kernels_of(isa).compress_state(pointer<const float>(in), state.type, state.at(0), state.scales_at(0), numel,
                                       key.value_or(optim::RandomKey{}));
      },
      "Stores float32 values in the format of a state, as adam stores a momentum.", nb::arg("isa"), nb::arg("in_"),
      nb::arg("state"), nb::arg("numel"), nb::kw_only(), nb::arg("key") = nb::none(), ReleaseGil());
}

void register_cpu_kernels(nb::module_& module) {
  register_adam(module, "adam", &optim::CpuKernels::adam, kAdamDoc);
  register_adam(module, "adam_param", &optim::CpuKernels::adam_param,
                "Like adam, but writes param only, in memory apart from grad. Requires a float32 master.");
  module.def(
      "adam_apart",
      [](const std::string& isa, const StateArray& master, const StateArray& momentum, const StateArray& variance,
         Address grad, DType grad_dtype, Address param, DType param_dtype, int64_t numel, int num_threads,
         const std::array<StateArray, 3>& new_states, const OptionalKey& key, const nb::kwargs& scalars_by_name) {
        const AdamArrays arrays{master, momentum,   variance,    grad,
                                param,  grad_dtype, param_dtype, key.value_or(optim::RandomKey{})};
        const optim::AdamScalars scalars = scalars_of(scalars_by_name);
        const optim::CpuKernels& kernels = kernels_of(isa);
        check_arrays(arrays, numel);
        check_whole_master(arrays);
        const auto& [new_master, new_momentum, new_variance] = new_states;
        if (numel > 0) {
          check_state("new master", new_master, {master.type});
          check_state("new momentum", new_momentum, {momentum.type});
          check_state("new variance", new_variance, {variance.type});
        }
        const nb::gil_scoped_release release;
        split(num_threads, numel, [&](int64_t begin, int64_t size) {
          optim::AdamRange range = arrays.range(begin, size);
          range.new_master = static_cast<float*>(new_states[0].at(begin));
          range.new_momentum = new_states[1].at(begin);
          range.new_variance = new_states[2].at(begin);
          range.new_momentum_scales = new_states[1].scales_at(begin);
          range.new_variance_scales = new_states[2].scales_at(begin);
          kernels.adam(range, scalars);
        });
      },
      "Like adam, but writes the new master, momentum and variance to new_states and keeps the old ones.",
      nb::arg("isa"), nb::arg("master"), nb::arg("momentum"), nb::arg("variance"), nb::arg("grad"),
      nb::arg("grad_dtype"), nb::arg("param"), nb::arg("param_dtype"), nb::arg("numel"), nb::arg("num_threads"),
      nb::arg("new_states"), nb::kw_only(), nb::arg("key") = nb::none(), nb::arg("scalars"));
  module.def(
      "cast_from_float",
      [](const std::string& isa, Address in, Address out, DType out_dtype, int64_t numel, int num_threads) {
        const optim::CpuKernels& kernels = kernels_of(isa);
        split(num_threads, numel, [&](int64_t begin, int64_t size) {
          kernels.cast_from_float(pointer<const float>(in) + begin, pointer<void>(offset(out, out_dtype, begin)),
                                  out_dtype, size);
        });
      },
      "out[i] = round(in[i]), in float32.", nb::arg("isa"), nb::arg("in_"), nb::arg("out"), nb::arg("out_dtype"),
      nb::arg("numel"), nb::arg("num_threads"), ReleaseGil());
  module.def(
      "cast_to_float",
      [](const std::string& isa, Address in, DType in_dtype, Address out, int64_t numel, int num_threads) {
        const optim::CpuKernels& kernels = kernels_of(isa);
        split(num_threads, numel, [&](int64_t begin, int64_t size) {
          kernels.cast_to_float(pointer<const void>(offset(in, in_dtype, begin)), in_dtype, pointer<float>(out) + begin,
                                size);
        });
      },
      "out[i] = in[i], out float32.", nb::arg("isa"), nb::arg("in_"), nb::arg("in_dtype"), nb::arg("out"),
      nb::arg("numel"), nb::arg("num_threads"), ReleaseGil());
}

void register_cpu_sums(nb::module_& module) {
  module.def(
      "add",
      [](const std::string& isa, Address sum, Address x, DType dtype, int64_t numel, int num_threads) {
        const optim::CpuKernels& kernels = kernels_of(isa);
        split(num_threads, numel, [&](int64_t begin, int64_t size) {
          kernels.add(pointer<void>(offset(sum, dtype, begin)), pointer<const void>(offset(x, dtype, begin)), dtype,
                      size);
        });
      },
      "sum[i] = round(sum[i] + x[i]), both of dtype.", nb::arg("isa"), nb::arg("sum"), nb::arg("x"), nb::arg("dtype"),
      nb::arg("numel"), nb::arg("num_threads"), ReleaseGil());
  module.def(
      "add_to_float",
      [](const std::string& isa, Address sum, Address x, DType x_dtype, int64_t numel, int num_threads) {
        const optim::CpuKernels& kernels = kernels_of(isa);
        split(num_threads, numel, [&](int64_t begin, int64_t size) {
          kernels.add_to_float(pointer<float>(sum) + begin, pointer<const void>(offset(x, x_dtype, begin)), x_dtype,
                               size);
        });
      },
      "sum[i] += x[i], sum float32.", nb::arg("isa"), nb::arg("sum"), nb::arg("x"), nb::arg("x_dtype"),
      nb::arg("numel"), nb::arg("num_threads"), ReleaseGil());
  module.def(
      "sum_squares",
      [](const std::string& isa, Address x, DType dtype, int64_t numel, Address partials, int num_threads) {
        const optim::CpuKernels& kernels = kernels_of(isa);
        split(num_threads, numel, [&](int64_t begin, int64_t size) {
          kernels.sum_squares(pointer<const void>(offset(x, dtype, begin)), dtype, size,
                              pointer<double>(partials) + begin / optim::kSquaresBlock);
        });
      },
      "partials[b] = sum of squares of block b of SQUARES_BLOCK elements; partials float64, one per block begun.",
      nb::arg("isa"), nb::arg("x"), nb::arg("dtype"), nb::arg("numel"), nb::arg("partials"), nb::arg("num_threads"),
      ReleaseGil());
  module.def(
      "add_up",
      [](Address partials, int64_t first, int64_t count) {
        const optim::WideSum sum = optim::add_up(pointer<const double>(partials), {first, count});
        return nb::make_tuple(sum.high, sum.low);
      },
      "Sum of `count` float64 partials from the first on: (rounded sum, rounding error).", nb::arg("partials"),
      nb::arg("first"), nb::arg("count"));
}

}  // namespace

void register_optim(nb::module_& module) {
  register_momentum_rule(module);
  nb::module_ optim_module = module.def_submodule("optim", "Leaf kernels of the optimizers and the loss scaler.");
  optim_module.attr("SQUARES_BLOCK") = optim::kSquaresBlock;
  optim_module.attr("SCALE_DEPENDENT_PIECE") = optim::kScaleDependentPiece;
  optim_module.attr("OPEN_LOG_BYTES") = sizeof(ScaleDependentLog);
  optim_module.def("isa", [] { return chosen_isa(); }, "The ISA whose kernels this process uses.");
  optim_module.def("supported_isas", &supported_isas, "The ISAs this processor has, narrowest first.");
  register_states(optim_module);
  register_cpu_kernels(optim_module);
  register_momentum_kernels(optim_module);
  register_cpu_sums(optim_module);
  register_scale_independent_values(optim_module);
  register_split_masters(optim_module);
  register_values_in_place(optim_module);
#ifdef PATRICKSTAR_WITH_CUDA
  register_cuda_kernels(optim_module);
#endif
  register_loss_scaler(optim_module);
}

}  // namespace patrickstar::bind
