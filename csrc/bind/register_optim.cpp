#include <string>

#include "bind/bind.h"
#include "bind/kernel_arguments.h"
#include "optim/wide_sum.h"

namespace nb = nanobind;

namespace patrickstar::bind {

namespace {

void register_split_masters(nb::module_& module) {
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
  module.def(
      "expand_state",
      [](const std::string& isa, const StateArray& state, Address out, int64_t numel) {
        kernels_of(isa).expand_state(state.type, pointer<void>(state.data), pointer<float>(state.scales),
                                     pointer<float>(out), numel);
      },
      "Converts a state to float32.", nb::arg("isa"), nb::arg("state"), nb::arg("out"), nb::arg("numel"), ReleaseGil());
  module.def(
      "compress_state",
      [](const std::string& isa, Address in, const StateArray& state, int64_t numel, const OptionalKey& key) {
        kernels_of(isa).compress_state(pointer<const float>(in), state.type, pointer<void>(state.data),
                                       pointer<float>(state.scales), numel, key.value_or(optim::RandomKey{}));
      },
      "Stores float32 values in the format of a state, as update stores a momentum.", nb::arg("isa"), nb::arg("in_"),
      nb::arg("state"), nb::arg("numel"), nb::kw_only(), nb::arg("key") = nb::none(), ReleaseGil());
}

void register_casts(nb::module_& module) {
  module.def(
      "cast_from_float",
      [](const std::string& isa, Address in, Address out, DType out_dtype, int64_t numel, int num_threads) {
        const optim::CpuKernels& kernels = kernels_of(isa);
        split(num_threads, numel, optim::kSquaresBlock, [&](int64_t begin, int64_t size) {
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
        split(num_threads, numel, optim::kSquaresBlock, [&](int64_t begin, int64_t size) {
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
        split(num_threads, numel, optim::kSquaresBlock, [&](int64_t begin, int64_t size) {
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
        split(num_threads, numel, optim::kSquaresBlock, [&](int64_t begin, int64_t size) {
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
        split(num_threads, numel, optim::kSquaresBlock, [&](int64_t begin, int64_t size) {
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
  optim_module.def("isa", [] { return chosen_isa(); }, "The ISA whose kernels this process uses.");
  optim_module.def("supported_isas", &supported_isas, "The ISAs this processor has, narrowest first.");
  register_update_arguments(optim_module);
  register_states(optim_module);
  register_casts(optim_module);
  register_cpu_sums(optim_module);
  register_split_masters(optim_module);
  register_update_kernels(optim_module);
#ifdef PATRICKSTAR_WITH_CUDA
  register_cuda_kernels(optim_module);
#endif
  register_loss_scaler(optim_module);
}

}  // namespace patrickstar::bind
