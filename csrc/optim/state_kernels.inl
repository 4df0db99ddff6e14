// A part of kernel_body.inl: states of fewer bytes, expanded to float32 and compressed again.

// [Note: random bits] of a range's elements, made one block at a time. Vectors read them from memory at any pair, so
// each hash serves two elements.
struct RandomBits {
  Vector::Int b, multiplier1, multiplier2;
  uint32_t a;
  int64_t first;
  alignas(64) uint16_t made[kStateBlock + 2 * Vector::kWidth];

  RandomBits(const RandomKey& key, Rounded rounded)
      : b(Vector::set_int(key.b)),
        multiplier1(Vector::set_int(0x21f0aaadu)),
        multiplier2(Vector::set_int(0xd35a2d97u)),
        a(key.a + static_cast<uint32_t>(rounded)),
        first(key.first) {}

  // Bits of elements i to i + kStateBlock - 1; valid until the next call.
  inline __attribute__((always_inline)) const uint16_t* make(int64_t i) {
    const int64_t odd = (first + i) & 1;
    auto counter = Vector::count_from(static_cast<uint32_t>((first + i) >> 1) + a);
    for (int64_t k = 0; k < kStateBlock + odd; k += 2 * Vector::kWidth) {
      Vector::store_halves(made + k, mixed(counter));
      counter = Vector::add_int(counter, Vector::set_int(Vector::kWidth));
    }
    return made + odd;
  }

 private:
  // One hash, for two elements.
  inline __attribute__((always_inline)) Vector::Int mixed(Vector::Int x) const {
    using V = Vector;
    x = V::mul_int(V::xor_int(x, V::template shift_right<16>(x)), multiplier1);
    x = V::xor_int(x, V::template shift_right<15>(x));
    x = V::mul_int(V::add_int(x, b), multiplier2);
    return V::xor_int(x, V::template shift_right<15>(x));
  }
};

// The upper half of the result is `x` rounded with a vector's random bits.
template <class V>
PS_INT rounded_up_by(typename V::Float x, const uint16_t* random) {
  return V::add_int(V::bits(x), V::load_u16(random));
}

// Upper half of a split master beside a variance of fewer bytes: round to nearest, ties away from zero.
template <class V>
inline __attribute__((always_inline)) typename V::Half half_away(typename V::Float x) {
  return V::upper(V::add_int(V::bits(x), V::set_int(0x8000u)));
}

// Prefetch distance in elements.
constexpr int64_t kBlockAhead = 2 * kStateBlock;

// Decodes 8-bit codes (dynamic_map.h).
template <class V>
struct SignedValues {
  typename V::Table slope, offset;

  // Written out: a defaulted constructor would be compiled for other instructions.
  SignedValues() : slope(V::table(kSignedMap.slope_by_exponent)), offset(V::table(kSignedMap.offset_by_exponent)) {}

  PS_FLOAT load(const uint8_t* codes) const {
    const auto code = V::load_i8(codes);
    const auto x = V::to_float(code);
    const auto exponent = V::template shift_right<23>(V::bits(x));
    return V::where_nonzero(code, V::fma(x, V::lookup(slope, exponent), V::flip(V::lookup(offset, exponent), x)));
  }
};

template <class V>
struct UnsignedValues {
  typename V::Table slope, offset;

  UnsignedValues()
      : slope(V::table(kUnsignedMap.slope_by_exponent)), offset(V::table(kUnsignedMap.offset_by_exponent)) {}

  PS_FLOAT load(const uint8_t* codes) const {
    const auto entry = V::to_float(V::add_int(V::load_u8(codes), V::set_int(1)));
    const auto exponent = V::template shift_right<23>(V::bits(entry));
    return V::fma(entry, V::lookup(slope, exponent), V::lookup(offset, exponent));
  }
};

// Encodes values scaled to magnitudes of at most 1. A NaN gets zero's code.
template <class V>
struct Sections {
  typename V::Table start, steps, first, last;

  explicit Sections(const DynamicMap& map)
      : start(V::table(map.start)), steps(V::table(map.steps)), first(V::table(map.first)), last(V::table(map.last)) {}

  // The entry of a magnitude >= kSignedLeast, before rounding. (For floats of one sign, smaller bits mean nearer to
  // zero.)
  PS_FLOAT place(typename V::Float x) const {
    const auto guess = V::bits(V::fma(V::to_float(V::bits(x)), V::set(kGuessSlope), V::set(kGuessOffset)));
    const auto section = V::less_one_where_less(guess, x, V::lookup(start, guess));
    const auto place = V::fma(x, V::lookup(steps, section), V::lookup(first, section));
    return V::floats(V::min_unsigned(V::bits(place), V::bits(V::lookup(last, section))));
  }
};

// No entry has the value -1; the entry before it is used.
template <class V>
struct SignedCodes {
  Sections<V> sections;

  SignedCodes() : sections(kSignedMap) {}
  PS_INT rounded(typename V::Float scaled) const {
    const auto x = V::magnitude_from(scaled, V::set(kSignedLeast));
    return V::round_to_int(V::flip(sections.place(x), scaled));
  }
  static PS_STEP store(uint8_t* codes, const typename V::Int (&rounded)[4]) { V::store_negated8(codes, rounded); }
};

// Only zero gets zero's code.
template <class V>
struct UnsignedCodes {
  Sections<V> sections;

  UnsignedCodes() : sections(kUnsignedMap) {}
  PS_INT rounded(typename V::Float scaled) const {
    const auto x = V::magnitude_from(scaled, V::set(kUnsignedLeast));
    return V::round_where_nonzero(scaled, sections.place(x));
  }
  static PS_STEP store(uint8_t* codes, const typename V::Int (&rounded)[4]) { V::store_less_one8(codes, rounded); }
};

PS_STEP prefetch_codes(const uint8_t* block) {
  for (int64_t i = 0; i < kStateBlock; i += 64) __builtin_prefetch(block + kBlockAhead + i);
}

template <template <class> class Values>
PS_LOOP expand_block(const uint8_t* data, float scale, float* out) {
  const Values<Vector> values;
  prefetch_codes(data);
  for (int64_t i = 0; i < kStateBlock; i += Vector::kWidth) {
    Vector::store(out + i, Vector::mul(values.load(data + i), Vector::set(scale)));
  }
}

// The float of largest magnitude, given as bits. NaNs rank above infinities, which rank above all other values.
template <class V>
struct Largest {
  typename V::Int positive;  // in signed order
  typename V::Int negative;  // in unsigned order, where negative floats rank highest

  Largest() : positive(V::set_int(0)), negative(V::set_int(0)) {}
  PS_STEP add(typename V::Float x) {
    positive = V::max_int(positive, V::bits(x));
    negative = V::max_unsigned(negative, V::bits(x));
  }
  // Returns the factor for encoding and stores the scale. The factor is 0 if there is no ordinary scale.
  PS_FLOAT find_scale(float* scale) const {
    const uint32_t most_positive = V::largest(positive);
    const uint32_t most_negative =
        V::largest_unsigned(negative) & 0x7fffffffu;  // or a positive value, if none is negative
    const bool is_positive = most_positive >= most_negative;
    const uint32_t most = is_positive ? most_positive : most_negative;
    const bool is_ordinary = most >= kLeastScaleBits && most < 0x7f800000u;
    const uint32_t ordinary = is_positive ? most : most | 0x80000000u;
    *scale = float_of(is_ordinary ? ordinary : most < kLeastScaleBits ? 0 : 0x7fc00000u);
    return V::set(is_ordinary ? 1.0f / float_of(ordinary) : 0.0f);
  }
};

// Elements of four vectors.
constexpr int64_t kCodes = 4 * Vector::kWidth;
template <class Codes>
PS_STEP put_codes(const Codes& codes, const float* in, Vector::Float inverse, uint8_t* data) {
  Vector::Int rounded[4];
#pragma GCC unroll 4
  for (int64_t k = 0; k < 4; ++k) {
    rounded[k] = codes.rounded(Vector::mul(Vector::load(in + k * Vector::kWidth), inverse));
  }
  codes.store(data, rounded);
}

template <template <class> class Codes>
PS_LOOP compress_block(const float* in, uint8_t* data, float* scale) {
  Largest<Vector> largest;
  for (int64_t i = 0; i < kStateBlock; i += Vector::kWidth) largest.add(Vector::load(in + i));
  const auto inverse = largest.find_scale(scale);
  const Codes<Vector> codes;
  for (int64_t i = 0; i < kStateBlock; i += kCodes) put_codes(codes, in + i, inverse, data + i);
}

// Codes to float32, and back; for a block that may be short.
inline void expand_codes(StateType type, const uint8_t* data, float scale, float* out, int64_t numel) {
  if (numel < kStateBlock) {
    uint8_t padded[kStateBlock] = {};
    alignas(64) float expanded[kStateBlock];
    __builtin_memcpy(padded, data, static_cast<size_t>(numel));
    expand_codes(type, padded, scale, expanded, kStateBlock);
    __builtin_memcpy(out, expanded, static_cast<size_t>(numel) * sizeof(float));
  } else if (type == StateType::kSigned8) {
    expand_block<SignedValues>(data, scale, out);
  } else {
    expand_block<UnsignedValues>(data, scale, out);
  }
}
inline void compress_codes(StateType type, const float* in, uint8_t* data, float* scale, int64_t numel) {
  if (numel < kStateBlock) {
    alignas(64) float padded[kStateBlock] = {};
    uint8_t compressed[kStateBlock];
    __builtin_memcpy(padded, in, static_cast<size_t>(numel) * sizeof(float));
    compress_codes(type, padded, compressed, scale, kStateBlock);
    __builtin_memcpy(data, compressed, static_cast<size_t>(numel));
  } else if (type == StateType::kSigned8) {
    compress_block<SignedCodes>(in, data, scale);
  } else {
    compress_block<UnsignedCodes>(in, data, scale);
  }
}

PS_LOOP round_to_bf16(const float* in, uint16_t* out, int64_t numel, const RandomKey& key, Rounded rounded) {
  RandomBits bits(key, rounded);
  for (int64_t begin = 0; begin < numel; begin += kStateBlock) {
    const uint16_t* const random = bits.make(begin);
    for_range(begin, begin + kStateBlock < numel ? begin + kStateBlock : numel, [&](auto lane, int64_t i) PS_INLINE {
      using V = decltype(lane);
      V::store16(out + i, V::upper(rounded_up_by<V>(V::quiet(V::load(in + i)), random + (i - begin))));
    });
  }
}

template <DType kIn>
PS_LOOP expand_loop(const void* in, float* out, int64_t numel) {
  for_range(0, numel, [&](auto lane, int64_t i) PS_INLINE {
    using V = decltype(lane);
    using Element = typename Storage<kIn>::Element;
    __builtin_prefetch(static_cast<const Element*>(in) + i + kBlockAhead);
    V::store(out + i, load<V, kIn>(in, i));
  });
}

// A range of any length; `data` and `scales` begin at its first element.
inline void expand(StateType type, const void* data, const float* scales, float* out, int64_t numel) {
  const auto* codes = static_cast<const uint8_t*>(data);
  switch (type) {
    case StateType::kFloat32:
      return expand_loop<DType::kFloat32>(data, out, numel);
    case StateType::kBFloat16:
      return expand_loop<DType::kBFloat16>(data, out, numel);
    case StateType::kSigned8:
    case StateType::kUnsigned8:
      for (int64_t i = 0; i < numel; i += kStateBlock) {
        const int64_t size = numel - i < kStateBlock ? numel - i : kStateBlock;
        expand_codes(type, codes + i, scales[i / kStateBlock], out + i, size);
      }
      return;
    case StateType::kLowerHalf:
    case StateType::kNone:
      return;
  }
}

inline void compress(const float* in, StateType type, void* out, float* scales, int64_t numel, const RandomKey& key,
                     Rounded rounded) {
  auto* codes = static_cast<uint8_t*>(out);
  switch (type) {
    case StateType::kFloat32:
      return expand_loop<DType::kFloat32>(in, static_cast<float*>(out), numel);
    case StateType::kBFloat16:
      return round_to_bf16(in, static_cast<uint16_t*>(out), numel, key, rounded);
    case StateType::kSigned8:
    case StateType::kUnsigned8:
      for (int64_t i = 0; i < numel; i += kStateBlock) {
        const int64_t size = numel - i < kStateBlock ? numel - i : kStateBlock;
        compress_codes(type, in + i, codes + i, scales + i / kStateBlock, size);
      }
      return;
    case StateType::kLowerHalf:
    case StateType::kNone:
      return;
  }
}

void expand_state(StateType type, const void* data, const float* scales, float* out, int64_t numel) {
  with_ieee_arithmetic([&] { expand(type, data, scales, out, numel); });
}

void compress_state(const float* in, StateType type, void* out, float* scales, int64_t numel, const RandomKey& key) {
  with_ieee_arithmetic([&] { compress(in, type, out, scales, numel, key, Rounded::kMomentum); });
}

// Bytes from a state's first element to `index`, a multiple of kStateBlock.
inline int64_t bytes_to(StateType type, int64_t index) {
  return type == StateType::kFloat32                                    ? 4 * index
         : type == StateType::kNone                                     ? 0
         : type == StateType::kSigned8 || type == StateType::kUnsigned8 ? index
                                                                        : 2 * index;
}

inline void* state_at(void* data, StateType type, int64_t index) {
  return data == nullptr ? nullptr : static_cast<char*>(data) + bytes_to(type, index);
}
