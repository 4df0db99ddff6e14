// The portable implementation and the reference for the others.
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "quant/kernels.h"
#include "quant/maps.h"

namespace patrickstar::quant {

namespace {
#include "quant/scalar_lane.inl"
struct Vector : ScalarLane {
  static Float nf4_values(const uint8_t* p, int64_t i) { return kNf4Map.values[i % 2 == 0 ? *p >> 4 : *p & 15]; }
};
#include "quant/kernel_body.inl"
}  // namespace

const CpuKernels kScalarKernels = table("scalar");

}  // namespace patrickstar::quant
