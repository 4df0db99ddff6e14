#include <algorithm>
#include <atomic>
#include <string>

#include "bind/bind.h"
#include "bind/kernel_arguments.h"
#include "common/check.h"
#include "optim/compute.h"
#ifdef PATRICKSTAR_WITH_CUDA
#include "optim/cuda_kernels.h"
#endif

namespace nb = nanobind;

namespace patrickstar::bind {

namespace {

// Log of a piece's scale-dependent values (optim/kernels.h), in the caller's memory.
struct ScaleDependentLog {
  static constexpr int64_t kCapacity = optim::kScaleDependentPiece / 16;
  int64_t count;
  char data[kCapacity * optim::ScaleDependentValues::kBytes];

  optim::ScaleDependentValues values() {
    optim::ScaleDependentValues result = optim::ScaleDependentValues::in(data, kCapacity);
    result.count = count;
    return result;
  }
};

// Calls fn(piece, its log) per kScaleDependentPiece elements.
template <class Function>
void for_pieces(const Threads& threads, const optim::AdamRange& range, Address logs, const Function& fn) {
  split(threads, range.numel, optim::kScaleDependentPiece, [&](int64_t first, int64_t numel) {
    for (int64_t begin = first; begin < first + numel; begin += optim::kScaleDependentPiece) {
      const int64_t end = std::min(begin + optim::kScaleDependentPiece, first + numel);
      fn(optim::subrange(range, begin, end), pointer<ScaleDependentLog>(logs)[begin / optim::kScaleDependentPiece]);
    }
  });
}

// For passes that write parameters only.
void check_param_pass(const optim::AdamRange& range, const Scalars& scalars) {
  check_variance(range, scalars);
  PS_CHECK(range.master_type == StateType::kFloat32, ArgumentError,
           "this pass leaves the old values as they are, which needs a float32 master; give one, or call update");
}

void check_half(const optim::AdamRange& range, const Scalars& scalars) {
  check_param_pass(range, scalars);
  PS_CHECK(element_size(range.param_dtype) == 2 && range.grad_dtype == range.param_dtype, ArgumentError,
           "scale-independent values need 16 bits; give grad and param of bfloat16, or both of float16");
}

void check_in_place(const optim::AdamRange& range, const optim::AdamScalars& scalars) {
  check_variance(range, scalars);
  PS_CHECK(range.master_type == StateType::kLowerHalf && range.grad_dtype == DType::kBFloat16, ArgumentError,
           "values are put in place for split masters and gradients of bfloat16 alone; give those, or call update");
}

void register_updates(nb::module_& module) {
  module.def(
      "update",
      [](const std::string& isa, const optim::AdamRange& range, const Scalars& scalars, Threads threads) {
        check_variance(range, scalars);
        optim::with_rule(kernels_of(isa), scalars, [&](const auto& kernels, const auto& of_rule) {
          split(threads, range.numel, optim::kSquaresBlock, [&](int64_t begin, int64_t numel) {
            kernels.step(optim::subrange(range, begin, begin + numel), of_rule);
          });
        });
      },
      "One optimizer step (optim/kernels.h). threads: a ThreadPool, or a number of threads. Raises ValueError for an "
      "ISA this processor lacks.",
      nb::arg("isa"), nb::arg("range"), nb::arg("scalars"), nb::arg("threads"), ReleaseGil());
  module.def(
      "update_param",
      [](const std::string& isa, const optim::AdamRange& range, const Scalars& scalars, Threads threads) {
        check_param_pass(range, scalars);
        optim::with_rule(kernels_of(isa), scalars, [&](const auto& kernels, const auto& of_rule) {
          split(threads, range.numel, optim::kSquaresBlock, [&](int64_t begin, int64_t numel) {
            kernels.param(optim::subrange(range, begin, begin + numel), of_rule);
          });
        });
      },
      "Like update, but writes param only, in memory apart from grad. Requires a float32 master.", nb::arg("isa"),
      nb::arg("range"), nb::arg("scalars"), nb::arg("threads"), ReleaseGil());
  module.def(
      "update_param_between",
      [](const std::string& isa, const optim::AdamRange& range, const Scalars& scalars, Threads threads, Address logs,
         float most_grad_scale) {
        check_half(range, scalars);
        optim::with_rule(kernels_of(isa), scalars, [&](const auto& kernels, const auto& of_rule) {
          for_pieces(threads, range, logs, [&](const optim::AdamRange& piece, ScaleDependentLog& log) {
            optim::ScaleDependentValues dependent = log.values();
            kernels.param_between(piece, of_rule, most_grad_scale, &dependent);
            log.count = dependent.count;
          });
        });
      },
      "Writes the 16-bit values that are the same for every grad_scale up to most_grad_scale. Scale-dependent values "
      "go to logs of OPEN_LOG_BYTES per SCALE_DEPENDENT_PIECE elements (optim/kernels.h).",
      nb::arg("isa"), nb::arg("range"), nb::arg("scalars"), nb::arg("threads"), nb::arg("logs"),
      nb::arg("most_grad_scale"), ReleaseGil());
  module.def(
      "update_param_scale_dependent",
      [](const std::string& isa, const optim::AdamRange& range, const Scalars& scalars, Threads threads, Address logs) {
        check_half(range, scalars);
        optim::with_rule(kernels_of(isa), scalars, [&](const auto& kernels, const auto& of_rule) {
          for_pieces(threads, range, logs, [&](const optim::AdamRange& piece, ScaleDependentLog& log) {
            kernels.param_scale_dependent(piece, of_rule, log.values());
          });
        });
      },
      "Like update_param, for the values that update_param_between logged.", nb::arg("isa"), nb::arg("range"),
      nb::arg("scalars"), nb::arg("threads"), nb::arg("logs"), ReleaseGil());
}

// In-place speculative updates (optim/kernels.h).
void register_values_in_place(nb::module_& module) {
  module.def(
      "put_values",
      [](const std::string& isa, const optim::AdamRange& range, const optim::AdamScalars& scalars, Threads threads,
         Address logs, float most_grad_scale, int64_t capacity) {
        check_in_place(range, scalars);
        PS_CHECK(capacity >= 0 && capacity <= ScaleDependentLog::kCapacity, ArgumentError, "capacity is ", capacity,
                 " values, a log has room for ", ScaleDependentLog::kCapacity, "; give no more");
        const optim::CpuKernels& kernels = kernels_of(isa);
        for_pieces(threads, range, logs, [&](const optim::AdamRange& piece, ScaleDependentLog& log) {
          optim::ScaleDependentValues dependent = log.values();
          dependent.capacity = capacity;
          kernels.adam_put_values(piece, scalars, most_grad_scale, &dependent);
          log.count = dependent.count;
        });
      },
      "In-place speculative update of bfloat16 params, the upper halves of split masters: writes values that are the "
      "same for every grad_scale up to most_grad_scale. Scale-dependent values go to logs of OPEN_LOG_BYTES per "
      "SCALE_DEPENDENT_PIECE elements, at most capacity values each (optim/kernels.h).",
      nb::arg("isa"), nb::arg("range"), nb::arg("scalars"), nb::arg("threads"), nb::arg("logs"),
      nb::arg("most_grad_scale"), nb::arg("capacity"), ReleaseGil());
  module.def(
      "put_scale_dependent_values",
      [](const std::string& isa, const optim::AdamRange& range, const optim::AdamScalars& scalars, Threads threads,
         Address logs) {
        check_in_place(range, scalars);
        const optim::CpuKernels& kernels = kernels_of(isa);
        for_pieces(threads, range, logs, [&](const optim::AdamRange& piece, ScaleDependentLog& log) {
          kernels.adam_put_scale_dependent_values(piece, scalars, log.values());
        });
      },
      "Writes the values that put_values logged.", nb::arg("isa"), nb::arg("range"), nb::arg("scalars"),
      nb::arg("threads"), nb::arg("logs"), ReleaseGil());
  module.def(
      "put_states",
      [](const std::string& isa, const optim::AdamRange& range, const optim::AdamScalars& scalars, Threads threads,
         Address logs, float least_grad_scale) {
        check_in_place(range, scalars);
        const optim::CpuKernels& kernels = kernels_of(isa);
        std::atomic<int64_t> wrong{0};
        for_pieces(threads, range, logs, [&](const optim::AdamRange& piece, ScaleDependentLog& log) {
          wrong += kernels.adam_put_states(piece, scalars, least_grad_scale, log.values());
        });
        return wrong.load();
      },
      "Phase two: updates the states. Returns the number of params that differ from the update's result.",
      nb::arg("isa"), nb::arg("range"), nb::arg("scalars"), nb::arg("threads"), nb::arg("logs"),
      nb::arg("least_grad_scale"), ReleaseGil());
  module.def(
      "take_values_back",
      [](const std::string& isa, const optim::AdamRange& range, const optim::AdamScalars& scalars, Threads threads,
         Address logs) {
        check_in_place(range, scalars);
        const optim::CpuKernels& kernels = kernels_of(isa);
        for_pieces(threads, range, logs, [&](const optim::AdamRange& piece, ScaleDependentLog& log) {
          kernels.adam_take_values_back(piece, scalars, log.values());
        });
      },
      "Rolls back put_values, given the same arguments.", nb::arg("isa"), nb::arg("range"), nb::arg("scalars"),
      nb::arg("threads"), nb::arg("logs"), ReleaseGil());
}

}  // namespace

void register_update_kernels(nb::module_& module) {
  module.attr("OPEN_LOG_BYTES") = sizeof(ScaleDependentLog);
  register_updates(module);
  register_values_in_place(module);
#ifdef PATRICKSTAR_WITH_CUDA
  module.def(
      "cuda_update",
      [](const optim::AdamRange& range, const Scalars& scalars, Address stream) {
        check_variance(range, scalars);
        const auto queue = reinterpret_cast<cudaStream_t>(stream);
        if (const auto* adam = std::get_if<optim::AdamScalars>(&scalars)) return optim::cuda::adam(range, *adam, queue);
        optim::cuda::momentum_step(range, std::get<optim::MomentumScalars>(scalars), queue);
      },
      "Like update.", nb::arg("range"), nb::arg("scalars"), nb::arg("stream"), ReleaseGil());
#endif
}

}  // namespace patrickstar::bind
