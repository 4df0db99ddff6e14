#include <cstring>

#include "common/isa.h"
#include "optim/cpu_isa.h"

namespace patrickstar::optim {

const CpuKernels& cpu_kernels() { return *cpu_kernels_named(chosen_isa()); }

const CpuKernels* cpu_kernels_named(const char* isa) {
  if (!has_isa(isa)) return nullptr;
#if defined(__x86_64__)
  if (std::strcmp(isa, "avx2") == 0) return &kAvx2Kernels;
  if (std::strcmp(isa, "avx512") == 0) return &kAvx512Kernels;
#endif
  return &kScalarKernels;
}

}  // namespace patrickstar::optim
