// Sixteen floats at a time: AVX-512 F, BW, VL, DQ (x86-64-v4). No bfloat16 instructions: VCVTNEPS2BF16 flushes
// denormals.
#if defined(__x86_64__)

#include <immintrin.h>

#include <cstdint>

#include "optim/cpu_isa.h"
#include "optim/dynamic_map.h"

// Silences GCC bug 105593: "undefined" vectors in GCC 12's header initialise themselves.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq")

namespace patrickstar::optim {

namespace {

#include "optim/scalar_lane.inl"

struct Vector {
  using Float = __m512;
  struct Squares {
    __m512d low, high;
  };
  static constexpr int64_t kWidth = 16;
  static constexpr int64_t kSquareVectors = 4;

  static Float set(float x) { return _mm512_set1_ps(x); }
  static Float load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, Float x) { _mm512_storeu_ps(p, x); }
  static Float load_bf16(const uint16_t* p) { return _mm512_castsi512_ps(to_upper(load16(p))); }
  static Float load_f16(const uint16_t* p) { return _mm512_cvtph_ps(load16(p)); }
  static __m256i to_bf16(Float x) {
    const __m512i bits = _mm512_castps_si512(x);
    const __mmask16 odd = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x10000));
    const __m512i biased = _mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff));
    return upper(_mm512_mask_add_epi32(biased, odd, biased, _mm512_set1_epi32(1)));
  }
  static __m256i to_f16(Float x) { return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static void store16(uint16_t* p, __m256i x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x); }
  static void stream(float* p, Float x) { _mm512_stream_ps(p, x); }
  static void stream16(uint16_t* p, __m256i x) { _mm256_stream_si256(reinterpret_cast<__m256i*>(p), x); }
  static void end_stream() { _mm_sfence(); }

  static Float add(Float a, Float b) { return _mm512_add_ps(a, b); }
  static Float sub(Float a, Float b) { return _mm512_sub_ps(a, b); }
  static Float mul(Float a, Float b) { return _mm512_mul_ps(a, b); }
  static Float div(Float a, Float b) { return _mm512_div_ps(a, b); }
  static Float fma(Float a, Float b, Float c) { return _mm512_fmadd_ps(a, b, c); }
  static Float sqrt(Float a) { return _mm512_sqrt_ps(a); }
  // One instruction: the first operand if `a` is a NaN (the two lowest hexadecimal digits of the table), else `a`.
  static Float quiet(Float a) {
    return _mm512_fixupimm_ps(_mm512_castsi512_ps(_mm512_set1_epi32(0x7fc00000)), a, _mm512_set1_epi32(0x11111100), 0);
  }

  static Float min(Float a, Float b) { return _mm512_min_ps(a, b); }
  static Float max(Float a, Float b) { return _mm512_max_ps(a, b); }
  static Float by_sign(Float sign, Float if_negative, Float otherwise) {
    return _mm512_mask_blend_ps(_mm512_movepi32_mask(_mm512_castps_si512(sign)), otherwise, if_negative);
  }
  static constexpr float kNearError = 0x1p-13f;  // the manual's bound is 2^-14
  static Float near_inverse(Float a) { return _mm512_rcp14_ps(a); }
  static Float near_inverse_sqrt(Float a) { return _mm512_rsqrt14_ps(a); }
  static unsigned not_at_most(Float a, Float b) { return _mm512_cmp_ps_mask(a, b, _CMP_NLE_UQ); }
  static unsigned unordered(Float a, Float b) { return _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q); }
  template <DType kType>
  static unsigned differ(Float a, Float b) {
    if constexpr (kType == DType::kBFloat16) return _mm256_cmpneq_epi16_mask(to_bf16(a), to_bf16(b));
    return _mm256_cmpneq_epi16_mask(to_f16(a), to_f16(b));
  }

  static __m512i distance(const uint16_t* lower, Float sign) {
    const __m512i carry = _mm512_slli_epi32(_mm512_srli_epi32(_mm512_castps_si512(sign), 31), 16);
    return _mm512_add_epi32(carry, _mm512_cvtepi16_epi32(load16(lower)));
  }
  static Float join(const uint16_t* upper, const uint16_t* lower, Float sign) {
    return _mm512_castsi512_ps(_mm512_add_epi32(to_upper(load16(upper)), distance(lower, sign)));
  }
  static __m256i lower(Float x) {
    const __m512i even =
        _mm512_broadcast_i64x4(_mm256_setr_epi16(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30));
    return _mm512_castsi512_si256(_mm512_permutexvar_epi16(even, _mm512_castps_si512(x)));
  }
  static Float tie(Float x) {
    const __m512i last = _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x1ffff));
    const __mmask16 is_tie = _mm512_cmpeq_epi32_mask(last, _mm512_set1_epi32(0x8000));
    return _mm512_castsi512_ps(_mm512_maskz_slli_epi32(is_tie, _mm512_set1_epi32(1), 31));
  }
  static Float magnitude(Float x) { return _mm512_andnot_ps(_mm512_set1_ps(-0.0f), x); }
  static Float with_sign(Float x, Float sign) { return _mm512_or_ps(x, _mm512_and_ps(_mm512_set1_ps(-0.0f), sign)); }

  using Int = __m512i;
  using Half = __m256i;
  static Int bits(Float x) { return _mm512_castps_si512(x); }
  static Float floats(Int x) { return _mm512_castsi512_ps(x); }
  static Int set_int(uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
  static Int count_from(uint32_t first) {
    return _mm512_add_epi32(set_int(first), _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
  }
  static Int add_int(Int a, Int b) { return _mm512_add_epi32(a, b); }
  static Int sub_int(Int a, Int b) { return _mm512_sub_epi32(a, b); }
  static Int mul_int(Int a, Int b) { return _mm512_mullo_epi32(a, b); }
  static unsigned different(Int a, Int b) { return _mm512_cmpneq_epi32_mask(a, b); }
  static Int xor_int(Int a, Int b) { return _mm512_xor_si512(a, b); }
  static Int and_int(Int a, Int b) { return _mm512_and_si512(a, b); }
  static Int max_int(Int a, Int b) { return _mm512_max_epi32(a, b); }
  static Int min_unsigned(Int a, Int b) { return _mm512_min_epu32(a, b); }
  static Int max_unsigned(Int a, Int b) { return _mm512_max_epu32(a, b); }
  static uint32_t largest(Int a) { return static_cast<uint32_t>(_mm512_reduce_max_epi32(a)); }
  static uint32_t largest_unsigned(Int a) { return _mm512_reduce_max_epu32(a); }
  template <int kBits>
  static Int shift_right(Int a) {
    return _mm512_srli_epi32(a, kBits);
  }
  static Int less_one_where_less(Int a, Float x, Float y) {
    return _mm512_mask_add_epi32(a, _mm512_cmp_ps_mask(x, y, _CMP_LT_OQ), a, _mm512_set1_epi32(-1));
  }
  static Float where_nonzero(Int a, Float x) { return _mm512_maskz_mov_ps(_mm512_test_epi32_mask(a, a), x); }
  static Float flip(Float a, Float sign) {
    const __m512i signs = _mm512_set1_epi32(static_cast<int>(0x80000000u));
    return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(_mm512_castps_si512(a), _mm512_castps_si512(sign), signs,
                                                         0x78));  // a ^ (sign & signs)
  }
  static Float magnitude_from(Float x, Float least) { return _mm512_range_ps(x, least, 0b1011); }
  static Float to_float(Int a) { return _mm512_cvtepi32_ps(a); }
  static Int round_to_int(Float x) { return _mm512_cvtps_epi32(x); }
  static Int round_where_nonzero(Float a, Float x) {
    return _mm512_maskz_cvtps_epi32(_mm512_cmp_ps_mask(a, _mm512_setzero_ps(), _CMP_NEQ_OQ), x);
  }
  static Half upper(Int a) {
    const __m512i odd =
        _mm512_broadcast_i64x4(_mm256_setr_epi16(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31));
    return _mm512_castsi512_si256(_mm512_permutexvar_epi16(odd, a));
  }
  static Int load_i8(const uint8_t* p) { return _mm512_cvtepi8_epi32(load8(p)); }
  static Int load_u8(const uint8_t* p) { return _mm512_cvtepu8_epi32(load8(p)); }
  static Int load_u16(const uint16_t* p) { return _mm512_cvtepu16_epi32(load16(p)); }
  static void store_halves(uint16_t* p, Int a) { _mm512_storeu_si512(p, a); }
  static void store_negated8(uint8_t* p, const Int (&a)[4]) {
    const __m512i bytes = _mm512_packs_epi16(_mm512_packs_epi32(a[0], a[1]), _mm512_packs_epi32(a[2], a[3]));
    store8(p, _mm512_sub_epi8(_mm512_setzero_si512(), bytes));
  }
  static void store_less_one8(uint8_t* p, const Int (&a)[4]) {
    const __m512i one = _mm512_set1_epi16(1);
    const __m512i low = _mm512_subs_epu16(_mm512_packus_epi32(a[0], a[1]), one);
    store8(p, _mm512_packus_epi16(low, _mm512_subs_epu16(_mm512_packus_epi32(a[2], a[3]), one)));
  }
  // Two copies of the table, because an index uses four bits.
  using Table = __m512;
  static Table table(const float* eight) { return _mm512_broadcast_f32x8(_mm256_loadu_ps(eight)); }
  static Float lookup(Table table, Int index) { return _mm512_permutexvar_ps(index, table); }

  static Squares zero_squares() { return {_mm512_setzero_pd(), _mm512_setzero_pd()}; }
  static Squares add_squares(Squares sums, Float x) {
    const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(x));
    const __m512d high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1));
    return {_mm512_fmadd_pd(low, low, sums.low), _mm512_fmadd_pd(high, high, sums.high)};
  }
  static void store_squares(double* p, Squares sums) {
    _mm512_storeu_pd(p, sums.low);
    _mm512_storeu_pd(p + 8, sums.high);
  }

 private:
  // Each half becomes the upper half of 32 bits.
  static __m512i to_upper(__m256i halves) {
    const __m512i index =
        _mm512_slli_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), 16);
    return _mm512_maskz_permutexvar_epi16(0xaaaaaaaau, index, _mm512_castsi256_si512(halves));
  }
  // Reorders bytes packed from four vectors; each 128 bits hold four bytes of every vector.
  static void store8(uint8_t* p, __m512i packed) {
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    _mm512_storeu_si512(p, _mm512_permutexvar_epi32(order, packed));
  }
  static __m128i load8(const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
  static __m256i load16(const uint16_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
};

#include "optim/kernel_body.inl"

}  // namespace

const CpuKernels kAvx512Kernels = table("avx512");

}  // namespace patrickstar::optim

#endif  // __x86_64__
