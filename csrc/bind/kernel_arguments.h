// Arguments of the leaf kernels' bindings: raw addresses, checked and converted to the ranges of optim/kernels.h.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <initializer_list>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "bind/bind.h"
#include "common/check.h"
#include "common/isa.h"
#include "common/thread_pool.h"
#include "optim/cpu_isa.h"
#include "optim/kernels.h"

namespace patrickstar::bind {

inline std::vector<std::string> supported_isas() {
  std::vector<std::string> names;
  for (const char* isa : kIsaNames) {
    if (has_isa(isa)) names.emplace_back(isa);
  }
  return names;
}

inline const optim::CpuKernels& kernels_of(const std::string& isa) {
  const optim::CpuKernels* kernels = optim::cpu_kernels_named(isa.c_str());
  if (kernels == nullptr) {
    std::string names;
    for (const std::string& name : supported_isas()) names += (names.empty() ? "" : ", ") + name;
    throw ArgumentError("isa is \"" + isa + "\", this processor has " + names + "; pass one of these");
  }
  return *kernels;
}

// Calls fn(first element, number of elements) on ranges that start at kSquaresBlock boundaries.
template <class Function>
void split(ThreadPool& pool, int64_t numel, const Function& fn) {
  PS_CHECK(numel >= 0, ArgumentError, "numel is ", numel, ", it must be at least 0; pass a tensor's numel()");
  pool.parallel_for(numel, optim::kSquaresBlock, [&](int64_t begin, int64_t end) { fn(begin, end - begin); });
}

template <class Function>
void split(int num_threads, int64_t numel, const Function& fn) {
  ThreadPool pool(num_threads);
  split(pool, numel, fn);
}

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

// Calls fn(index, first element, number of elements) per piece.
template <class Function>
void split_into_pieces(int num_threads, int64_t numel, const Function& fn) {
  ThreadPool pool(num_threads);
  pool.parallel_for(optim::num_scale_dependent_pieces(numel), 1, [&](int64_t begin, int64_t end) {
    for (int64_t piece = begin; piece < end; ++piece) {
      const int64_t first = piece * optim::kScaleDependentPiece;
      fn(piece, first, std::min(optim::kScaleDependentPiece, numel - first));
    }
  });
}

// Defaults to a key of zeros.
using OptionalKey = std::optional<optim::RandomKey>;

// The caller's pool, or a thread count for a temporary one.
using Threads = std::variant<ThreadPool*, int>;

inline Address offset(Address address, DType dtype, int64_t elements) {
  return address + static_cast<Address>(elements * element_size(dtype));
}

// An optimizer state. In Python, a bare address means float32.
struct StateArray {
  StateType type = StateType::kFloat32;
  Address data = 0;
  Address scales = 0;

  void* at(int64_t index) const { return data == 0 ? nullptr : pointer<char>(data) + state_offset(type, index); }
  float* scales_at(int64_t index) const { return scales == 0 ? nullptr : pointer<float>(scales) + index / kStateBlock; }
};

struct AdamArrays {
  StateArray master, momentum, variance;
  Address grad, param;
  DType grad_dtype, param_dtype;
  optim::RandomKey key = {};

  optim::AdamRange range(int64_t begin, int64_t numel) const {
    optim::AdamRange result{};
    result.master = master.at(begin);
    result.momentum = momentum.at(begin);
    result.variance = variance.at(begin);
    result.grad = pointer<const void>(offset(grad, grad_dtype, begin));
    result.param = param == 0 ? nullptr : pointer<void>(offset(param, param_dtype, begin));
    result.grad_dtype = grad_dtype;
    result.param_dtype = param_dtype;
    result.numel = numel;
    result.master_type = master.type;
    result.momentum_type = momentum.type;
    result.variance_type = variance.type;
    result.momentum_scales = momentum.scales_at(begin);
    result.variance_scales = variance.scales_at(begin);
    result.key = {key.a, key.b, key.first + begin};
    return result;
  }
};

inline void check_state(const char* name, const StateArray& array, std::initializer_list<StateType> types) {
  PS_CHECK(std::find(types.begin(), types.end(), array.type) != types.end(), ArgumentError, name,
           " cannot be of this StateType (", static_cast<int>(array.type),
           "); optim/kernels.h lists those it can be of");
  PS_CHECK(array.data != 0 || array.type == StateType::kNone, ArgumentError, name,
           " is null; only param may be 0 (no compute copy), and a master of StateType.NONE");
  PS_CHECK((array.scales != 0) == is_8_bit(array.type), ArgumentError, name, " has ", array.scales == 0 ? "no " : "",
           "scales, which states of 8 bits alone have; give their address with those, and 0 with others");
}

inline constexpr std::initializer_list<StateType> kVariances = {StateType::kFloat32, StateType::kBFloat16,
                                                                StateType::kUnsigned8};

inline void check_arrays(const AdamArrays& arrays, int64_t numel,
                         std::initializer_list<StateType> variances = kVariances) {
  if (numel == 0) return;
  check_state("master", arrays.master, {StateType::kFloat32, StateType::kLowerHalf, StateType::kNone});
  check_state("momentum", arrays.momentum, {StateType::kFloat32, StateType::kBFloat16, StateType::kSigned8});
  check_state("variance", arrays.variance, variances);
  PS_CHECK(arrays.grad != 0, ArgumentError, "grad is null; only param may be 0 (no compute copy)");
  PS_CHECK(
      arrays.master.type == StateType::kFloat32 ||
          (arrays.param != 0 && arrays.param != arrays.grad && arrays.param_dtype == DType::kBFloat16),
      ArgumentError,
      "param must be bfloat16 and apart from grad where the master is not of float32: it is part of the state; give "
      "it memory of its own, or a float32 master");
  PS_CHECK(arrays.param != arrays.grad || element_size(arrays.param_dtype) == element_size(arrays.grad_dtype),
           ArgumentError, "param has the address of grad, but elements of ", element_size(arrays.param_dtype),
           " bytes where grad's have ", element_size(arrays.grad_dtype), "; give param memory of its own");
}

// For passes that keep the old states.
inline void check_whole_master(const AdamArrays& arrays) {
  PS_CHECK(arrays.master.type == StateType::kFloat32, ArgumentError,
           "this pass leaves the old values as they are, which needs a float32 master; give one, or call adam");
}

inline void check_half(DType grad_dtype, DType param_dtype) {
  PS_CHECK(element_size(param_dtype) == 2 && grad_dtype == param_dtype, ArgumentError,
           "values are settled in 16 bits alone; give grad and param of bfloat16, or both of float16");
}

inline constexpr const char* kAdamDoc =
    "One Adam step over numel elements at raw addresses (optim/kernels.h). master, momentum and variance: float32 or a "
    "StateArray. param may be grad, or 0. threads: a ThreadPool, or a number of threads. Keyword arguments: all fields "
    "of AdamScalars. Raises ValueError for null arrays, an ISA this processor lacks, or a param over a grad of another "
    "size.";

}  // namespace patrickstar::bind
