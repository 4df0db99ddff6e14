// One element at a time: the scalar implementation, and the ragged ends of ranges in the others. Included by each
// cpu_<isa>.cpp inside its anonymous namespace, after its target pragma.
#include "common/elements.inl"

// The interface of `Vector` in kernel_body.inl, with one lane.
struct ScalarLane {
  using Float = float;
  using Squares = double;
  static constexpr int64_t kWidth = 1;
  // Number of Squares that registers hold beside everything else.
  static constexpr int64_t kSquareVectors = 8;

  static Float set(float x) { return x; }
  static Float load(const float* p) { return *p; }
  static void store(float* p, Float x) { *p = x; }
  static Float load_bf16(const uint16_t* p) { return float_of(static_cast<uint32_t>(*p) << 16); }
  static Float load_f16(const uint16_t* p) { return float_from_f16(*p); }
  // A NaN must have passed quiet(), so that both roundings give the canonical 16-bit one.
  static uint16_t to_bf16(Float x) { return bf16_from_float(x); }
  static uint16_t to_f16(Float x) { return f16_from_float(x); }
  static void store16(uint16_t* p, uint16_t x) { *p = x; }
  // Non-temporal stores, where the ISA has them; end_stream() makes them visible to other threads.
  static void stream(float* p, Float x) { *p = x; }
  static void stream16(uint16_t* p, uint16_t x) { *p = x; }
  static void end_stream() {}

  static Float add(Float a, Float b) { return a + b; }
  static Float sub(Float a, Float b) { return a - b; }
  static Float mul(Float a, Float b) { return a * b; }
  static Float div(Float a, Float b) { return a / b; }
  static Float fma(Float a, Float b, Float c) { return __builtin_fmaf(a, b, c); }
  static Float sqrt(Float a) { return __builtin_sqrtf(a); }
  static Float quiet(Float a) { return a == a ? a : float_of(0x7fc00000u); }

  // Returns `b` if an operand is NaN, like the processor's instruction.
  static Float min(Float a, Float b) { return a < b ? a : b; }
  static Float max(Float a, Float b) { return a > b ? a : b; }
  static Float by_sign(Float sign, Float if_negative, Float otherwise) {
    return (bits_of(sign) & 0x80000000u) != 0 ? if_negative : otherwise;
  }
  // Relative errors of 1 / a and 1 / sqrt(a) are below kNearError for ordinary a.
  static constexpr float kNearError = 0x1p-20f;
  static Float near_inverse(Float a) { return 1 / a; }
  static Float near_inverse_sqrt(Float a) { return 1 / __builtin_sqrtf(a); }
  // One bit per lane: set unless a <= b.
  static unsigned not_at_most(Float a, Float b) { return a <= b ? 0u : 1u; }
  // One bit per lane: set if a or b is NaN; differ() also if they round to different 16 bits.
  static unsigned unordered(Float a, Float b) { return a != a || b != b ? 1u : 0u; }
  template <DType kType>
  static unsigned differ(Float a, Float b) {
    if constexpr (kType == DType::kBFloat16) return to_bf16(a) != to_bf16(b) ? 1u : 0u;
    return to_f16(a) != to_f16(b) ? 1u : 0u;
  }

  // [Note: split masters]
  static uint32_t distance(const uint16_t* lower, Float sign) {
    return static_cast<uint32_t>(static_cast<int32_t>(static_cast<int16_t>(*lower))) + (bits_of(sign) >> 31 << 16);
  }
  static Float join(const uint16_t* upper, const uint16_t* lower, Float sign) {
    return float_of((static_cast<uint32_t>(*upper) << 16) + distance(lower, sign));
  }
  static uint16_t lower(Float x) { return static_cast<uint16_t>(bits_of(x)); }
  // -0 if `x` is halfway between an even upper half and the next one, else 0.
  static Float tie(Float x) { return float_of((bits_of(x) & 0x1ffffu) == 0x8000u ? 0x80000000u : 0u); }
  static Float magnitude(Float x) { return float_of(bits_of(x) & 0x7fffffffu); }
  // `x` must be a magnitude.
  static Float with_sign(Float x, Float sign) { return float_of(bits_of(x) | (bits_of(sign) & 0x80000000u)); }

  // 32-bit integers, one per float.
  using Int = uint32_t;
  using Half = uint16_t;
  static Int bits(Float x) { return bits_of(x); }
  static Float floats(Int x) { return float_of(x); }
  static Int set_int(uint32_t x) { return x; }
  // `first` and the following integers.
  static Int count_from(uint32_t first) { return first; }
  static Int add_int(Int a, Int b) { return a + b; }
  static Int sub_int(Int a, Int b) { return a - b; }
  static Int mul_int(Int a, Int b) { return a * b; }
  // One bit per lane: set if a != b.
  static unsigned different(Int a, Int b) { return a != b ? 1u : 0u; }
  static Int xor_int(Int a, Int b) { return a ^ b; }
  static Int and_int(Int a, Int b) { return a & b; }
  static Int max_int(Int a, Int b) { return static_cast<int32_t>(a) > static_cast<int32_t>(b) ? a : b; }
  static Int min_unsigned(Int a, Int b) { return a < b ? a : b; }
  static Int max_unsigned(Int a, Int b) { return a > b ? a : b; }
  // The largest lane in signed and in unsigned order.
  static uint32_t largest(Int a) { return a; }
  static uint32_t largest_unsigned(Int a) { return a; }
  template <int kBits>
  static Int shift_right(Int a) {
    return a >> kBits;
  }
  // a - 1 if x < y, else a.
  static Int less_one_where_less(Int a, Float x, Float y) { return a - (x < y ? 1u : 0u); }
  static Float where_nonzero(Int a, Float x) { return a != 0 ? x : 0.0f; }
  // -a if the sign bit of `sign` is set.
  static Float flip(Float a, Float sign) { return float_of(bits_of(a) ^ (bits_of(sign) & 0x80000000u)); }
  // max(|x|, least); NaN for a NaN.
  static Float magnitude_from(Float x, Float least) { return max(magnitude(x), least); }
  static Float to_float(Int a) { return static_cast<float>(static_cast<int32_t>(a)); }
  // Rounds to nearest even; magnitudes below 2^22.
  static Int round_to_int(Float x) { return bits_of(x + 0x1.8p23f) - 0x4b400000u; }
  // round_to_int(x); 0 if `a` is 0, -0 or NaN.
  static Int round_where_nonzero(Float a, Float x) { return a < 0.0f || a > 0.0f ? round_to_int(x) : 0; }
  // The upper halves.
  static Half upper(Int a) { return static_cast<uint16_t>(a >> 16); }
  static Int load_i8(const uint8_t* p) { return static_cast<uint32_t>(static_cast<int32_t>(static_cast<int8_t>(*p))); }
  static Int load_u8(const uint8_t* p) { return *p; }
  static Int load_u16(const uint16_t* p) { return *p; }
  // The lower half of each integer, then its upper half.
  static void store_halves(uint16_t* p, Int a) {
    p[0] = static_cast<uint16_t>(a);
    p[1] = static_cast<uint16_t>(a >> 16);
  }
  // Stores four vectors as bytes: -a for signed a, saturated to [-128, 127].
  static void store_negated8(uint8_t* p, const Int (&a)[4]) {
    for (int k = 0; k < 4; ++k) {
      const auto x = static_cast<int32_t>(a[k]);
      p[k] = static_cast<uint8_t>(-(x < -128 ? -128 : x > 127 ? 127 : x));
    }
  }
  // Stores four vectors as bytes: a - 1 for `a` from 1 to 256, 0 for 0.
  static void store_less_one8(uint8_t* p, const Int (&a)[4]) {
    for (int k = 0; k < 4; ++k) p[k] = static_cast<uint8_t>(a[k] == 0 ? 0 : a[k] - 1);
  }
  // A table of eight floats, indexed by the lowest three bits.
  using Table = const float*;
  static Table table(const float* eight) { return eight; }
  static Float lookup(Table table, Int index) { return table[index % 8]; }

  static Squares zero_squares() { return 0.0; }
  // The square of a float is exact in binary64 (48 bits), so product and sum round like one fma.
  static Squares add_squares(Squares sums, Float x) {
    const double wide = static_cast<double>(x);
    return wide * wide + sums;
  }
  static void store_squares(double* p, Squares sums) { *p = sums; }
};
