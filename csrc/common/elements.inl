// Scalar host arithmetic on chunk elements: storage types, casts to and from binary32, and the floating-point mode.
// Included in an anonymous namespace after <cstdint>, common/dtype.h, <immintrin.h> on x86, and the target pragma, if
// any ([Note: ISA files]).
//
// Casts to and from 16 bits use integers: results do not depend on the processor's conversions or denormal handling.

template <DType kType>
struct Storage {
  using Element = uint16_t;
};
template <>
struct Storage<DType::kFloat32> {
  using Element = float;
};

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
  // 65520 is halfway between 65504, the largest half, and 65536.
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);
  if (magnitude >= 0x38800000u) {
    const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
    return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
  }
  // Denormal halves are multiples of 2^-24. Up to half a unit (a tie rounds to even) the result is zero.
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

template <DType kType>
struct Tag {
  static constexpr DType value = kType;
};

// Calls body(Tag<dtype>()).
template <class Body>
inline void with_dtype(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kFloat32:
      return body(Tag<DType::kFloat32>());
    case DType::kBFloat16:
      return body(Tag<DType::kBFloat16>());
    case DType::kFloat16:
      return body(Tag<DType::kFloat16>());
  }
}

// Runs body() with IEEE defaults, whatever the caller's rounding mode or torch.set_flush_denormal. Loops in body() are
// not inlined, so no arithmetic moves across. No destructor restores the mode: this file must not emit exception
// tables.
template <class Body>
inline void with_ieee_arithmetic(const Body& body) {
#if defined(__x86_64__)
  const unsigned saved = _mm_getcsr();
  _mm_setcsr(0x1f80);
  body();
  _mm_setcsr(saved);
#else
  body();
#endif
}
