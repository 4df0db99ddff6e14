#include <cstdlib>
#include <cstring>
#include <string>

#include "common/check.h"
#include "optim/cpu_isa.h"

namespace patrickstar::optim {

namespace {

std::string supported_names() {
  std::string names;
  for (const char* isa : kIsaNames) {
    if (cpu_kernels_named(isa) != nullptr) names += (names.empty() ? "" : ", ") + std::string(isa);
  }
  return names;
}

bool is_known(const char* isa) {
  for (const char* known : kIsaNames) {
    if (std::strcmp(known, isa) == 0) return true;
  }
  return false;
}

const CpuKernels& choose() {
  const char* wanted = std::getenv("PATRICKSTAR_ISA");
  if (wanted != nullptr && *wanted != '\0') {
    const CpuKernels* kernels = cpu_kernels_named(wanted);
    PS_CHECK(kernels != nullptr, ArgumentError, "PATRICKSTAR_ISA is \"", wanted, "\", ",
             is_known(wanted) ? "which this processor lacks" : "which is not one of scalar, avx2, avx512",
             "; this processor has ", supported_names(), "; set one of these or unset the variable");
    return *kernels;
  }
  const CpuKernels* widest = nullptr;
  for (const char* isa : kIsaNames) {
    if (const CpuKernels* kernels = cpu_kernels_named(isa)) widest = kernels;
  }
  return *widest;
}

}  // namespace

const CpuKernels& cpu_kernels() {
  static const CpuKernels& chosen = choose();
  return chosen;
}

const CpuKernels* cpu_kernels_named(const char* isa) {
  if (std::strcmp(isa, "scalar") == 0) return &kScalarKernels;
#if defined(__x86_64__)
  if (std::strcmp(isa, "avx2") == 0) {
    const bool has = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    return has ? &kAvx2Kernels : nullptr;
  }
  if (std::strcmp(isa, "avx512") == 0) {
    const bool has = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                     __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    return has ? &kAvx512Kernels : nullptr;
  }
#endif
  return nullptr;
}

}  // namespace patrickstar::optim
