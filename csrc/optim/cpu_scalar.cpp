// The portable implementation and the reference for the others.
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "optim/cpu_isa.h"
#include "optim/dynamic_map.h"

namespace patrickstar::optim {

namespace {
#include "optim/scalar_lane.inl"
using Vector = ScalarLane;
#include "optim/kernel_body.inl"
}  // namespace

const CpuKernels kScalarKernels = table("scalar");

}  // namespace patrickstar::optim
