// One element at a time: the whole scalar implementation, and the ragged ends of ranges in the others.
// Included by each cpu_<isa>.cpp inside its anonymous namespace, after its target pragma.
//
// Casts to and from 16 bits are written with integers, so that they depend neither on the processor's
// conversion instructions nor on its handling of denormals.

inline uint32_t bits_of(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof(bits));
  return bits;
}

inline float float_of(uint32_t bits) {
  float x;
  __builtin_memcpy(&x, &bits, sizeof(x));
  return x;
}

inline uint16_t bf16_from_float(float x) {
  const uint32_t bits = bits_of(x);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline uint16_t f16_from_float(float x) {
  const uint32_t bits = bits_of(x);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7e00;
  // 65520 is halfway between 65504, the largest half, and the 65536 that would follow it.
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);
  if (magnitude >= 0x38800000u) {
    const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
    return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
  }
  // Denormal halves count units of 2^-24; up to half a unit (a tie goes to even) the result is zero.
  if (magnitude <= 0x33000000u) return static_cast<uint16_t>(sign);
  const uint32_t significand = (magnitude & 0x7fffffu) | 0x800000u;
  const uint32_t shift = 126u - (magnitude >> 23);
  const uint32_t units = significand >> shift;
  const uint32_t rest = significand & ((1u << shift) - 1u);
  const uint32_t half = 1u << (shift - 1u);
  const bool up = rest > half || (rest == half && (units & 1u) != 0);
  return static_cast<uint16_t>(sign | (units + (up ? 1u : 0u)));
}

inline float float_from_f16(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t magnitude = half & 0x7fffu;
  // A NaN keeps its payload and becomes quiet, as the processor's conversion does it.
  if (magnitude > 0x7c00u) return float_of(sign | 0x7fc00000u | (magnitude << 13));
  if (magnitude == 0x7c00u) return float_of(sign | 0x7f800000u);
  if (magnitude >= 0x400u) return float_of(sign | ((magnitude << 13) + 0x38000000u));
  return float_of(sign | bits_of(static_cast<float>(magnitude) * 0x1p-24f));
}

// The interface that kernel_body.inl asks of `Vector`, with one lane.
struct ScalarLane {
  using Float = float;
  using Squares = double;
  static constexpr int64_t kWidth = 1;
  // How many Squares the registers hold beside everything else.
  static constexpr int64_t kSquareVectors = 8;

  static Float set(float x) { return x; }
  static Float load(const float* p) { return *p; }
  static void store(float* p, Float x) { *p = x; }
  static Float load_bf16(const uint16_t* p) { return float_of(static_cast<uint32_t>(*p) << 16); }
  static Float load_f16(const uint16_t* p) { return float_from_f16(*p); }
  // A NaN must be quiet()'s, which both roundings turn into the canonical one of 16 bits.
  static uint16_t to_bf16(Float x) { return bf16_from_float(x); }
  static uint16_t to_f16(Float x) { return f16_from_float(x); }
  static void store16(uint16_t* p, uint16_t x) { *p = x; }
  // A store that bypasses the cache, where the ISA has one; end_stream makes such stores visible to others.
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

  static Squares zero_squares() { return 0.0; }
  // The square of a float is exact in binary64 (48 bits), so product and sum round as one fma does.
  static Squares add_squares(Squares sums, Float x) {
    const double wide = static_cast<double>(x);
    return wide * wide + sums;
  }
  static void store_squares(double* p, Squares sums) { *p = sums; }
};
