// Eight floats at a time: AVX2, FMA, F16C (x86-64-v3).
#if defined(__x86_64__)

#include <immintrin.h>

#include <cstdint>

#include "quant/kernels.h"
#include "quant/maps.h"

#pragma GCC target("avx2,fma,f16c")

namespace patrickstar::quant {

namespace {

#include "quant/scalar_lane.inl"

struct Vector {
  using Float = __m256;
  using Int = __m256i;
  static constexpr int64_t kWidth = 8;

  static Float set(float x) { return _mm256_set1_ps(x); }
  static Float load(const float* p) { return _mm256_loadu_ps(p); }
  static Float mul(Float a, Float b) { return _mm256_mul_ps(a, b); }
  static Int zero() { return _mm256_setzero_si256(); }
  static Int max_magnitude(Int a, Float x) {
    return _mm256_max_epi32(a, _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x7fffffff)));
  }
  static uint32_t largest(Int a) {
    uint32_t lanes[kWidth];
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(lanes), a);
    uint32_t most = 0;
    for (uint32_t lane : lanes) most = lane > most ? lane : most;
    return most;
  }
  static Int nf4_code(Float x) {
    __m256i code = _mm256_setzero_si256();
    for (int step = 8; step > 0; step /= 2) {
      const __m256i steps = _mm256_set1_epi32(step);
      const __m256 bound = lookup(kNf4Map.bounds, _mm256_add_epi32(code, _mm256_set1_epi32(step - 1)));
      const __m256i above = _mm256_castps_si256(_mm256_cmp_ps(x, bound, _CMP_GT_OQ));
      code = _mm256_add_epi32(code, _mm256_and_si256(above, steps));
    }
    return code;
  }
  static void store_codes(uint8_t* p, Int a) {
    const __m256i low = _mm256_and_si256(a, _mm256_set1_epi32(0xff));
    const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(words, words));
  }
  static Int round_to_int(Float x) { return _mm256_cvtps_epi32(x); }
  static Float from_int8(const uint8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
  }
  // Each byte holds two lanes: first its upper half, then its lower.
  static Float nf4_values(const uint8_t* p, int64_t) {
    int32_t four;
    __builtin_memcpy(&four, p, sizeof(four));
    const __m256i bytes = _mm256_cvtepu8_epi64(_mm_cvtsi32_si128(four));
    const __m256i low = _mm256_and_si256(bytes, _mm256_set1_epi64x(15));
    return lookup(kNf4Map.values, _mm256_or_si256(_mm256_srli_epi64(bytes, 4), _mm256_slli_epi64(low, 32)));
  }

  static void store_float(float* p, Float x) { _mm256_storeu_ps(p, x); }
  static void store_bf16(uint16_t* p, Float x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
    const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, bias), 16);
    store16(p, _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1)));
  }
  static void store_f16(uint16_t* p, Float x) {
    store16(p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }

 private:
  static void store16(uint16_t* p, __m128i x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), x); }
  // Lookup in a table of sixteen floats.
  static Float lookup(const float* table, __m256i index) {
    const __m256 lower = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), index);
    const __m256 upper = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table + 8), index);
    return _mm256_blendv_ps(lower, upper, _mm256_castsi256_ps(_mm256_slli_epi32(index, 28)));
  }
};

#include "quant/kernel_body.inl"

}  // namespace

const CpuKernels kAvx2Kernels = table("avx2");

}  // namespace patrickstar::quant

#endif  // __x86_64__
