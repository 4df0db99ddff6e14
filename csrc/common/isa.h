// The instruction sets that leaf kernels are compiled for, and which of them this process uses.
#pragma once

namespace patrickstar {

// All names that PATRICKSTAR_ISA may have, narrowest first.
constexpr const char* kIsaNames[] = {"scalar", "avx2", "avx512"};

// Whether this processor has what kernels of that name are compiled for; false for an unknown name.
bool has_isa(const char* isa);

// The widest ISA this processor has, or the one that PATRICKSTAR_ISA names (scalar, avx2, avx512): one of kIsaNames.
// Chosen once per process. Throws ArgumentError when the variable names an ISA that is unknown or that this processor
// lacks.
const char* chosen_isa();

}  // namespace patrickstar
