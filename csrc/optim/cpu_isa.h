// The per-ISA tables behind cpu_kernels(): each is defined in its own translation unit cpu_<isa>.cpp.
//
// [Note: ISA files] A cpu_<isa>.cpp compiles kernel_body.inl for instructions the processor at hand may
// lack. Were it to emit a function that other files emit too (an inline function of the standard library,
// say), the linker could keep its copy for the whole program, which would then crash on older processors.
// So these files include only <immintrin.h>, <cstdint> and plain headers of our own, keep everything but
// the table in an anonymous namespace, and the tables are constants that need no code to initialise.
#pragma once

#include "optim/kernels.h"

namespace patrickstar::optim {

extern const CpuKernels kScalarKernels;
#if defined(__x86_64__)
extern const CpuKernels kAvx2Kernels;
extern const CpuKernels kAvx512Kernels;
#endif

}  // namespace patrickstar::optim
