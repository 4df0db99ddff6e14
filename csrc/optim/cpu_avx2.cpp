// Eight floats at a time: AVX2, FMA, F16C (x86-64-v3).
#if defined(__x86_64__)

#include <immintrin.h>

#include <cstdint>

#include "optim/cpu_isa.h"
#include "optim/dynamic_map.h"

#pragma GCC target("avx2,fma,f16c")

namespace patrickstar::optim {

namespace {

#include "optim/scalar_lane.inl"

struct Vector {
  using Float = __m256;
  struct Squares {
    __m256d low, high;
  };
  static constexpr int64_t kWidth = 8;
  static constexpr int64_t kSquareVectors = 4;

  static Float set(float x) { return _mm256_set1_ps(x); }
  static Float load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, Float x) { _mm256_storeu_ps(p, x); }
  static Float load_bf16(const uint16_t* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load16(p)), 16));
  }
  static Float load_f16(const uint16_t* p) { return _mm256_cvtph_ps(load16(p)); }
  static __m128i to_bf16(Float x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
    const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, bias), 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1));
  }
  static __m128i to_f16(Float x) { return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static void store16(uint16_t* p, __m128i x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), x); }
  static void stream(float* p, Float x) { _mm256_stream_ps(p, x); }
  static void stream16(uint16_t* p, __m128i x) { _mm_stream_si128(reinterpret_cast<__m128i*>(p), x); }
  static void end_stream() { _mm_sfence(); }

  static Float add(Float a, Float b) { return _mm256_add_ps(a, b); }
  static Float sub(Float a, Float b) { return _mm256_sub_ps(a, b); }
  static Float mul(Float a, Float b) { return _mm256_mul_ps(a, b); }
  static Float div(Float a, Float b) { return _mm256_div_ps(a, b); }
  static Float fma(Float a, Float b, Float c) { return _mm256_fmadd_ps(a, b, c); }
  static Float sqrt(Float a) { return _mm256_sqrt_ps(a); }
  static Float quiet(Float a) {
    return _mm256_blendv_ps(a, _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000)), _mm256_cmp_ps(a, a, _CMP_UNORD_Q));
  }

  static Float min(Float a, Float b) { return _mm256_min_ps(a, b); }
  static Float max(Float a, Float b) { return _mm256_max_ps(a, b); }
  static Float by_sign(Float sign, Float if_negative, Float otherwise) {
    return _mm256_blendv_ps(otherwise, if_negative, sign);
  }
  static constexpr float kNearError = 0x1p-11f;  // the manual's bound is 1.5 * 2^-12
  static Float near_inverse(Float a) { return _mm256_rcp_ps(a); }
  static Float near_inverse_sqrt(Float a) { return _mm256_rsqrt_ps(a); }
  static unsigned not_at_most(Float a, Float b) {
    return static_cast<unsigned>(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_NLE_UQ)));
  }
  static unsigned unordered(Float a, Float b) {
    return static_cast<unsigned>(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_UNORD_Q)));
  }
  template <DType kType>
  static unsigned differ(Float a, Float b) {
    const __m128i same =
        kType == DType::kBFloat16 ? _mm_cmpeq_epi16(to_bf16(a), to_bf16(b)) : _mm_cmpeq_epi16(to_f16(a), to_f16(b));
    return static_cast<unsigned>(_mm_movemask_epi8(_mm_packs_epi16(same, same))) % 256u ^ 255u;
  }

  static __m256i distance(const uint16_t* lower, Float sign) {
    const __m256i carry = _mm256_slli_epi32(_mm256_srli_epi32(_mm256_castps_si256(sign), 31), 16);
    return _mm256_add_epi32(carry, _mm256_cvtepi16_epi32(load16(lower)));
  }
  static Float join(const uint16_t* upper, const uint16_t* lower, Float sign) {
    const __m256i high = _mm256_slli_epi32(_mm256_cvtepu16_epi32(load16(upper)), 16);
    return _mm256_castsi256_ps(_mm256_add_epi32(high, distance(lower, sign)));
  }
  static __m128i lower(Float x) {
    const __m256i low = _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0xffff));
    return _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
  }
  static Float tie(Float x) {
    const __m256i last = _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x1ffff));
    const __m256i is_tie = _mm256_cmpeq_epi32(last, _mm256_set1_epi32(0x8000));
    return _mm256_castsi256_ps(_mm256_slli_epi32(is_tie, 31));
  }
  static Float magnitude(Float x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }
  static Float with_sign(Float x, Float sign) { return _mm256_or_ps(x, _mm256_and_ps(_mm256_set1_ps(-0.0f), sign)); }

  using Int = __m256i;
  using Half = __m128i;
  static Int bits(Float x) { return _mm256_castps_si256(x); }
  static Float floats(Int x) { return _mm256_castsi256_ps(x); }
  static Int set_int(uint32_t x) { return _mm256_set1_epi32(static_cast<int>(x)); }
  static Int count_from(uint32_t first) {
    return _mm256_add_epi32(set_int(first), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
  static Int add_int(Int a, Int b) { return _mm256_add_epi32(a, b); }
  static Int sub_int(Int a, Int b) { return _mm256_sub_epi32(a, b); }
  static Int mul_int(Int a, Int b) { return _mm256_mullo_epi32(a, b); }
  static unsigned different(Int a, Int b) {
    const __m256 same = _mm256_castsi256_ps(_mm256_cmpeq_epi32(a, b));
    return static_cast<unsigned>(_mm256_movemask_ps(same)) ^ 255u;
  }
  static Int xor_int(Int a, Int b) { return _mm256_xor_si256(a, b); }
  static Int and_int(Int a, Int b) { return _mm256_and_si256(a, b); }
  static Int max_int(Int a, Int b) { return _mm256_max_epi32(a, b); }
  static Int min_unsigned(Int a, Int b) { return _mm256_min_epu32(a, b); }
  static Int max_unsigned(Int a, Int b) { return _mm256_max_epu32(a, b); }
  static uint32_t largest(Int a) {
    __m128i x = _mm_max_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    x = _mm_max_epi32(x, _mm_shuffle_epi32(x, 0x4e));
    return static_cast<uint32_t>(_mm_cvtsi128_si32(_mm_max_epi32(x, _mm_shuffle_epi32(x, 0xb1))));
  }
  static uint32_t largest_unsigned(Int a) {
    __m128i x = _mm_max_epu32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    x = _mm_max_epu32(x, _mm_shuffle_epi32(x, 0x4e));
    return static_cast<uint32_t>(_mm_cvtsi128_si32(_mm_max_epu32(x, _mm_shuffle_epi32(x, 0xb1))));
  }
  template <int kBits>
  static Int shift_right(Int a) {
    return _mm256_srli_epi32(a, kBits);
  }
  static Int less_one_where_less(Int a, Float x, Float y) {
    return _mm256_add_epi32(a, _mm256_castps_si256(_mm256_cmp_ps(x, y, _CMP_LT_OQ)));
  }
  static Float where_nonzero(Int a, Float x) {
    return _mm256_andnot_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(a, _mm256_setzero_si256())), x);
  }
  static Float flip(Float a, Float sign) { return _mm256_xor_ps(a, _mm256_and_ps(_mm256_set1_ps(-0.0f), sign)); }
  static Float magnitude_from(Float x, Float least) { return _mm256_max_ps(magnitude(x), least); }
  static Float to_float(Int a) { return _mm256_cvtepi32_ps(a); }
  static Int round_to_int(Float x) { return _mm256_cvtps_epi32(x); }
  static Int round_where_nonzero(Float a, Float x) {
    const __m256 is_nonzero = _mm256_cmp_ps(a, _mm256_setzero_ps(), _CMP_NEQ_OQ);
    return _mm256_cvtps_epi32(_mm256_and_ps(is_nonzero, x));
  }
  static Half upper(Int a) {
    const __m256i high = _mm256_srli_epi32(a, 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
  }
  static Int load_i8(const uint8_t* p) { return _mm256_cvtepi8_epi32(load8(p)); }
  static Int load_u8(const uint8_t* p) { return _mm256_cvtepu8_epi32(load8(p)); }
  static Int load_u16(const uint16_t* p) { return _mm256_cvtepu16_epi32(load16(p)); }
  static void store_halves(uint16_t* p, Int a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a); }
  static void store_negated8(uint8_t* p, const Int (&a)[4]) {
    const __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(a[0], a[1]), _mm256_packs_epi32(a[2], a[3]));
    store8(p, _mm256_sub_epi8(_mm256_setzero_si256(), bytes));
  }
  static void store_less_one8(uint8_t* p, const Int (&a)[4]) {
    const __m256i one = _mm256_set1_epi16(1);
    const __m256i low = _mm256_subs_epu16(_mm256_packus_epi32(a[0], a[1]), one);
    store8(p, _mm256_packus_epi16(low, _mm256_subs_epu16(_mm256_packus_epi32(a[2], a[3]), one)));
  }
  using Table = __m256;
  static Table table(const float* eight) { return _mm256_loadu_ps(eight); }
  static Float lookup(Table table, Int index) { return _mm256_permutevar8x32_ps(table, index); }

  static Squares zero_squares() { return {_mm256_setzero_pd(), _mm256_setzero_pd()}; }
  static Squares add_squares(Squares sums, Float x) {
    const __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(x));
    const __m256d high = _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1));
    return {_mm256_fmadd_pd(low, low, sums.low), _mm256_fmadd_pd(high, high, sums.high)};
  }
  static void store_squares(double* p, Squares sums) {
    _mm256_storeu_pd(p, sums.low);
    _mm256_storeu_pd(p + 4, sums.high);
  }

 private:
  // Reorders bytes packed from four vectors; each 128 bits hold four bytes of every vector.
  static void store8(uint8_t* p, __m256i packed) {
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permutevar8x32_epi32(packed, order));
  }
  static __m128i load8(const uint8_t* p) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)); }
  static __m128i load16(const uint16_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
};

#include "optim/kernel_body.inl"

}  // namespace

const CpuKernels kAvx2Kernels = table("avx2");

}  // namespace patrickstar::optim

#endif  // __x86_64__
