// Instruction sets of the kernels, and the one that this process uses.
#pragma once

namespace patrickstar {

// Allowed values of PATRICKSTAR_ISA, narrowest first.
constexpr const char* kIsaNames[] = {"scalar", "avx2", "avx512"};

// True if this processor supports `isa`; false for an unknown name.
bool has_isa(const char* isa);

// The value of PATRICKSTAR_ISA, or the widest instruction set of this processor. Chosen once per process. Throws
// ArgumentError if the variable's value is unknown or unsupported here.
const char* chosen_isa();

}  // namespace patrickstar
