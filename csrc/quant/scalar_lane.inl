// One element at a time: the scalar implementation, and the ragged ends of ranges in the others. Included by each
// cpu_<isa>.cpp inside its anonymous namespace, after its target pragma ([Note: ISA files]).
#include "common/elements.inl"

// The interface of `Vector` in kernel_body.inl, with one lane.
struct ScalarLane {
  using Float = float;
  using Int = uint32_t;
  static constexpr int64_t kWidth = 1;

  static Float set(float x) { return x; }
  static Float load(const float* p) { return *p; }
  static Float mul(Float a, Float b) { return a * b; }
  // Magnitudes as integers have the order of the numbers, with NaN above all.
  static Int zero() { return 0; }
  static Int max_magnitude(Int a, Float x) {
    const uint32_t bits = bits_of(x) & 0x7fffffffu;
    return a > bits ? a : bits;
  }
  static uint32_t largest(Int a) { return a; }
  // Number of kNf4Map.bounds below x.
  static Int nf4_code(Float x) {
    uint32_t code = 0;
    for (uint32_t step = 8; step > 0; step /= 2) code += x > kNf4Map.bounds[code + step - 1] ? step : 0;
    return code;
  }
  static void store_codes(uint8_t* p, Int a) { *p = static_cast<uint8_t>(a); }
  // Rounds to nearest even; magnitudes below 2^22.
  static Int round_to_int(Float x) { return bits_of(x + 0x1.8p23f) - 0x4b400000u; }
  static Float from_int8(const uint8_t* p) { return static_cast<float>(static_cast<int8_t>(*p)); }

  static void store_float(float* p, Float x) { *p = x; }
  static void store_bf16(uint16_t* p, Float x) { *p = bf16_from_float(x); }
  static void store_f16(uint16_t* p, Float x) { *p = f16_from_float(x); }
};
