// Sixteen floats at a time: AVX-512 F, BW, VL, DQ (x86-64-v4). No bfloat16 instructions: VCVTNEPS2BF16 flushes
// denormals.
#if defined(__x86_64__)

#include <immintrin.h>

#include <cstdint>

#include "quant/kernels.h"
#include "quant/maps.h"

// Silences GCC bug 105593: "undefined" vectors in GCC 12's header initialise themselves.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq")

namespace patrickstar::quant {

namespace {

#include "quant/scalar_lane.inl"

struct Vector {
  using Float = __m512;
  using Int = __m512i;
  static constexpr int64_t kWidth = 16;

  static Float set(float x) { return _mm512_set1_ps(x); }
  static Float load(const float* p) { return _mm512_loadu_ps(p); }
  static Float mul(Float a, Float b) { return _mm512_mul_ps(a, b); }
  static Int zero() { return _mm512_setzero_si512(); }
  static Int max_magnitude(Int a, Float x) {
    return _mm512_max_epi32(a, _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7fffffff)));
  }
  static uint32_t largest(Int a) { return static_cast<uint32_t>(_mm512_reduce_max_epi32(a)); }
  static Int nf4_code(Float x) {
    const __m512 bounds = _mm512_loadu_ps(kNf4Map.bounds);
    __m512i code = _mm512_setzero_si512();
    for (int step = 8; step > 0; step /= 2) {
      const __m512 bound = _mm512_permutexvar_ps(_mm512_add_epi32(code, _mm512_set1_epi32(step - 1)), bounds);
      const __mmask16 above = _mm512_cmp_ps_mask(x, bound, _CMP_GT_OQ);
      code = _mm512_mask_add_epi32(code, above, code, _mm512_set1_epi32(step));
    }
    return code;
  }
  static void store_codes(uint8_t* p, Int a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a));
  }
  static Int round_to_int(Float x) { return _mm512_cvtps_epi32(x); }
  static Float from_int8(const uint8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
  }
  // Each byte holds two lanes: first its upper half, then its lower.
  static Float nf4_values(const uint8_t* p, int64_t) {
    const __m512i bytes = _mm512_cvtepu8_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    const __m512i low = _mm512_and_si512(bytes, _mm512_set1_epi64(15));
    const __m512i codes = _mm512_or_si512(_mm512_srli_epi64(bytes, 4), _mm512_slli_epi64(low, 32));
    return _mm512_permutexvar_ps(codes, _mm512_loadu_ps(kNf4Map.values));
  }

  static void store_float(float* p, Float x) { _mm512_storeu_ps(p, x); }
  static void store_bf16(uint16_t* p, Float x) {
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i bias = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
    store16(p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_add_epi32(bits, bias), 16)));
  }
  static void store_f16(uint16_t* p, Float x) {
    store16(p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }

 private:
  static void store16(uint16_t* p, __m256i x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x); }
};

#include "quant/kernel_body.inl"

}  // namespace

const CpuKernels kAvx512Kernels = table("avx512");

}  // namespace patrickstar::quant

#endif  // __x86_64__
