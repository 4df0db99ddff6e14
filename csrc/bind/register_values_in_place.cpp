#include <atomic>

#include "bind/adam_scalars.h"
#include "bind/bind.h"
#include "bind/kernel_arguments.h"

namespace nb = nanobind;

namespace patrickstar::bind {

namespace {

// Arguments common to the passes of in-place speculative updates (optim/kernels.h).
struct SplitArrays {
  AdamArrays arrays;
  optim::AdamScalars scalars;
  const optim::CpuKernels& kernels;
  ScaleDependentLog* logs;

  SplitArrays(const std::string& isa, Address lower, const StateArray& momentum, const StateArray& variance,
              Address grad, Address param, int64_t numel, Address logs, const OptionalKey& key,
              const nb::kwargs& scalars_by_name)
      : arrays{{StateType::kLowerHalf, lower},  momentum, variance, grad, param, DType::kBFloat16, DType::kBFloat16,
               key.value_or(optim::RandomKey{})},
        scalars(scalars_of(scalars_by_name)),
        kernels(kernels_of(isa)),
        logs(pointer<ScaleDependentLog>(logs)) {
    check_arrays(arrays, numel);
  }
};

}  // namespace

void register_values_in_place(nb::module_& module) {
  module.def(
      "adam_put_values",
      [](const std::string& isa, Address lower, const StateArray& momentum, const StateArray& variance, Address grad,
         Address param, int64_t numel, int num_threads, Address logs, float most_grad_scale, int64_t capacity,
         const nb::kwargs& scalars) {
        const SplitArrays given(isa, lower, momentum, variance, grad, param, numel, logs, {}, scalars);
        PS_CHECK(capacity >= 0 && capacity <= ScaleDependentLog::kCapacity, ArgumentError, "capacity is ", capacity,
                 " values, a log has room for ", ScaleDependentLog::kCapacity, "; give no more");
        const nb::gil_scoped_release release;
        split_into_pieces(num_threads, numel, [&](int64_t piece, int64_t begin, int64_t size) {
          ScaleDependentLog& log = given.logs[piece];
          optim::ScaleDependentValues dependent = log.values();
          dependent.capacity = capacity;
          given.kernels.adam_put_values(given.arrays.range(begin, size), given.scalars, most_grad_scale, &dependent);
          log.count = dependent.count;
        });
      },
      "In-place speculative update of bfloat16 params, the upper halves of split masters: writes values that are the "
      "same for every grad_scale up to most_grad_scale. Scale-dependent values go to logs of OPEN_LOG_BYTES per "
      "SCALE_DEPENDENT_PIECE elements, at most capacity values each (optim/kernels.h).",
      nb::arg("isa"), nb::arg("lower"), nb::arg("momentum"), nb::arg("variance"), nb::arg("grad"), nb::arg("param"),
      nb::arg("numel"), nb::arg("num_threads"), nb::arg("logs"), nb::arg("most_grad_scale"), nb::arg("capacity"),
      nb::arg("scalars"));
  module.def(
      "adam_put_scale_dependent_values",
      [](const std::string& isa, Address lower, const StateArray& momentum, const StateArray& variance, Address grad,
         Address param, int64_t numel, int num_threads, Address logs, const OptionalKey& key,
         const nb::kwargs& scalars) {
        const SplitArrays given(isa, lower, momentum, variance, grad, param, numel, logs, key, scalars);
        const nb::gil_scoped_release release;
        split_into_pieces(num_threads, numel, [&](int64_t piece, int64_t begin, int64_t size) {
          given.kernels.adam_put_scale_dependent_values(given.arrays.range(begin, size), given.scalars,
                                                        given.logs[piece].values());
        });
      },
      "Writes the values that adam_put_values logged.", nb::arg("isa"), nb::arg("lower"), nb::arg("momentum"),
      nb::arg("variance"), nb::arg("grad"), nb::arg("param"), nb::arg("numel"), nb::arg("num_threads"), nb::arg("logs"),
      nb::kw_only(), nb::arg("key") = nb::none(), nb::arg("scalars"));
  module.def(
      "adam_put_states",
      [](const std::string& isa, Address lower, const StateArray& momentum, const StateArray& variance, Address grad,
         Address param, int64_t numel, int num_threads, Address logs, float least_grad_scale, const OptionalKey& key,
         const nb::kwargs& scalars) {
        const SplitArrays given(isa, lower, momentum, variance, grad, param, numel, logs, key, scalars);
        std::atomic<int64_t> wrong{0};
        const nb::gil_scoped_release release;
        split_into_pieces(num_threads, numel, [&](int64_t piece, int64_t begin, int64_t size) {
          wrong += given.kernels.adam_put_states(given.arrays.range(begin, size), given.scalars, least_grad_scale,
                                                 given.logs[piece].values());
        });
        return wrong.load();
      },
      "Phase two: updates the states. Returns the number of params that differ from the update's result.",
      nb::arg("isa"), nb::arg("lower"), nb::arg("momentum"), nb::arg("variance"), nb::arg("grad"), nb::arg("param"),
      nb::arg("numel"), nb::arg("num_threads"), nb::arg("logs"), nb::arg("least_grad_scale"), nb::kw_only(),
      nb::arg("key") = nb::none(), nb::arg("scalars"));
  module.def(
      "adam_take_values_back",
      [](const std::string& isa, Address lower, const StateArray& momentum, const StateArray& variance, Address grad,
         Address param, int64_t numel, int num_threads, Address logs, const nb::kwargs& scalars) {
        const SplitArrays given(isa, lower, momentum, variance, grad, param, numel, logs, {}, scalars);
        const nb::gil_scoped_release release;
        split_into_pieces(num_threads, numel, [&](int64_t piece, int64_t begin, int64_t size) {
          given.kernels.adam_take_values_back(given.arrays.range(begin, size), given.scalars,
                                              given.logs[piece].values());
        });
      },
      "Rolls back adam_put_values, given the same arguments.", nb::arg("isa"), nb::arg("lower"), nb::arg("momentum"),
      nb::arg("variance"), nb::arg("grad"), nb::arg("param"), nb::arg("numel"), nb::arg("num_threads"), nb::arg("logs"),
      nb::arg("scalars"));
}

}  // namespace patrickstar::bind
