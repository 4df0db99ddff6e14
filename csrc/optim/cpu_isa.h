// The per-ISA tables behind cpu_kernels(). Each is defined in its own translation unit cpu_<isa>.cpp.
//
// [Note: ISA files] A cpu_<isa>.cpp is compiled for instructions that the processor may lack. Suppose it
// emitted a function that other files emit too, such as an inline function of the standard library. The linker could
// then keep this copy for the whole program, which would crash on older processors. These files therefore include only
// <immintrin.h>, <cstdint> and plain headers of this project. All but the table is in an anonymous namespace, and the
// tables are constants without initialisation code.
#pragma once

#include "optim/kernels.h"

namespace patrickstar::optim {

extern const CpuKernels kScalarKernels;
#if defined(__x86_64__)
extern const CpuKernels kAvx2Kernels;
extern const CpuKernels kAvx512Kernels;
#endif

}  // namespace patrickstar::optim
