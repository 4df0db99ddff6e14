// Arguments of the leaf kernels' bindings: raw addresses, checked and converted to the ranges of optim/kernels.h.
#pragma once

#include <nanobind/nanobind.h>

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

// The caller's pool, or a thread count for a temporary one.
using Threads = std::variant<ThreadPool*, int>;

// Calls fn(first element, number of elements) on ranges that start at multiples of `grain`.
template <class Function>
void split(const Threads& threads, int64_t numel, int64_t grain, const Function& fn) {
  PS_CHECK(numel >= 0, ArgumentError, "numel is ", numel, ", it must be at least 0; pass a tensor's numel()");
  const auto part = [&](int64_t begin, int64_t end) { fn(begin, end - begin); };
  if (ThreadPool* const* pool = std::get_if<ThreadPool*>(&threads)) {
    return (*pool)->parallel_for(numel, grain, part);
  }
  ThreadPool(std::get<int>(threads)).parallel_for(numel, grain, part);
}

// Defaults to a key of zeros.
using OptionalKey = std::optional<optim::RandomKey>;

inline Address offset(Address address, DType dtype, int64_t elements) {
  return address + static_cast<Address>(elements * element_size(dtype));
}

// An optimizer state. In Python, a bare address means float32.
struct StateArray {
  StateType type = StateType::kFloat32;
  Address data = 0;
  Address scales = 0;
};

using Scalars = std::variant<optim::AdamScalars, optim::MomentumScalars>;

// A variance if and only if the rule has one.
inline void check_variance(const optim::AdamRange& range, const Scalars& scalars) {
  const bool has_variance = range.variance_type != StateType::kNone;
  PS_CHECK(range.numel == 0 || has_variance == std::holds_alternative<optim::AdamScalars>(scalars), ArgumentError,
           "variance cannot be of this StateType (", static_cast<int>(range.variance_type),
           "); StateType.NONE is for MomentumScalars, and others for AdamScalars");
}

}  // namespace patrickstar::bind
