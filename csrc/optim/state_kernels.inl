// A part of kernel_body.inl: states of fewer bytes, expanded to float32 and compressed again ([Note: states of fewer
// bytes] in kernels.h).

// [Note: random bits] of element `first + i` and those after it, 32 for each.
template <class V>
struct RandomBits {
  typename V::Int a, b, multiplier1, multiplier2;
  uint32_t first;

  explicit RandomBits(const RandomKey& key)
      : a(V::set_int(key.a)),
        b(V::set_int(key.b)),
        multiplier1(V::set_int(0x7feb352du)),
        multiplier2(V::set_int(0x846ca68bu)),
        first(static_cast<uint32_t>(key.first)) {}

  PS_INT states(int64_t i) const {
    auto x = V::xor_int(V::count_from(first + static_cast<uint32_t>(i)), a);
    x = V::mul_int(V::xor_int(x, V::template shift_right<16>(x)), multiplier1);
    x = V::xor_int(x, V::template shift_right<15>(x));
    x = V::mul_int(V::add_int(x, b), multiplier2);
    return V::xor_int(x, V::template shift_right<16>(x));
  }
  PS_INT param(int64_t i) const {
    auto x = V::add_int(states(i), V::set_int(0x9e3779b9u));
    x = V::mul_int(V::xor_int(x, V::template shift_right<16>(x)), multiplier1);
    x = V::mul_int(V::xor_int(x, V::template shift_right<15>(x)), multiplier2);
    return V::template shift_right<16>(x);
  }
};

// The 16 random bits that a state is rounded with.
struct UpperBits {
  template <class V>
  static PS_INT of(typename V::Int x) {
    return V::template shift_right<16>(x);
  }
};
struct LowerBits {
  template <class V>
  static PS_INT of(typename V::Int x) {
    return V::and_int(x, V::set_int(0xffffu));
  }
};

// The upper half of a split master whose variance is of fewer bytes: rounded to nearest, away from zero halfway.
template <class V>
inline __attribute__((always_inline)) typename V::Half half_away(typename V::Float x) {
  return V::upper(V::add_int(V::bits(x), V::set_int(0x8000u)));
}

// Memory beyond what is read now, in elements.
constexpr int64_t kBlockAhead = 2 * kStateBlock;

template <class V>
struct SignedCodes {
  typename V::Table slope, offset, start, steps, first, last;

  // (One that the compiler writes would be for other instructions.)
  SignedCodes()
      : slope(V::table(kSignedMap.slope_by_exponent)),
        offset(V::table(kSignedMap.offset_by_exponent)),
        start(V::table(kSignedMap.start)),
        steps(V::table(kSignedMap.steps)),
        first(V::table(kSignedMap.first)),
        last(V::table(kSignedMap.last)) {}

  static PS_INT load(const uint8_t* codes) { return V::load_i8(codes); }
  PS_FLOAT value(typename V::Int code) const {
    const auto x = V::to_float(code);
    const auto exponent = V::template shift_right<23>(V::bits(x));
    const auto y =
        V::where_nonzero(code, V::fma(V::magnitude(x), V::lookup(slope, exponent), V::lookup(offset, exponent)));
    return V::floats(V::xor_int(V::bits(y), V::and_int(V::bits(x), V::set_int(0x80000000u))));
  }
  // Of the entry nearest to |x|; there is none of value -1.
  static PS_INT code(typename V::Int entry, typename V::Float x) {
    const auto sign = V::signs(V::bits(x));
    const auto magnitude = V::min_int(entry, V::add_int(V::set_int(128), sign));
    return V::add_int(V::xor_int(magnitude, sign), V::template shift_right<31>(sign));
  }
};

template <class V>
struct UnsignedCodes {
  typename V::Table slope, offset, start, steps, first, last;

  // (One that the compiler writes would be for other instructions.)
  UnsignedCodes()
      : slope(V::table(kUnsignedMap.slope_by_exponent)),
        offset(V::table(kUnsignedMap.offset_by_exponent)),
        start(V::table(kUnsignedMap.start)),
        steps(V::table(kUnsignedMap.steps)),
        first(V::table(kUnsignedMap.first)),
        last(V::table(kUnsignedMap.last)) {}

  static PS_INT load(const uint8_t* codes) { return V::load_u8(codes); }
  PS_FLOAT value(typename V::Int code) const {
    const auto entry = V::to_float(V::add_int(code, V::set_int(1)));
    const auto exponent = V::template shift_right<23>(V::bits(entry));
    return V::fma(entry, V::lookup(slope, exponent), V::lookup(offset, exponent));
  }
  // Of the entry nearest to x, but that of the least positive one where x is positive.
  static PS_INT code(typename V::Int entry, typename V::Float x) {
    return V::max_int(V::add_int(entry, V::set_int(0xffffffffu)), V::min_int(V::bits(x), V::set_int(1)));
  }
};

template <class V, template <class> class Codes>
PS_INT nearest_code(const Codes<V>& codes, typename V::Float scaled) {
  const auto x = V::magnitude(scaled);
  const auto guess = V::fma(V::to_float(V::bits(x)), V::set(kGuessSlope), V::set(kGuessOffset));
  auto section = V::round_to_int(V::max(guess, V::set(0.0f)));
  section = V::add_int(section, V::less(x, V::lookup(codes.start, section)));
  const auto entry = V::fma(x, V::lookup(codes.steps, section), V::lookup(codes.first, section));
  return codes.code(V::round_to_int(V::min(entry, V::lookup(codes.last, section))), scaled);
}

template <template <class> class Codes>
PS_LOOP expand_block(const uint8_t* data, float scale, float* out, int64_t numel) {
  const Codes<Vector> codes;
  const Codes<ScalarLane> single;
  __builtin_prefetch(data + kBlockAhead);
  __builtin_prefetch(data + kBlockAhead + 64);
  __builtin_prefetch(data + kBlockAhead + 128);
  __builtin_prefetch(data + kBlockAhead + 192);
  int64_t i = 0;
  for (; i + Vector::kWidth <= numel; i += Vector::kWidth) {
    Vector::store(out + i, Vector::mul(codes.value(codes.load(data + i)), Vector::set(scale)));
  }
  for (; i < numel; ++i) out[i] = single.value(single.load(data + i)) * scale;
}

// As bits: those of a NaN are above infinity's, which are above all others.
struct Largest {
  uint32_t magnitude = 0;
  uint32_t positive = 0;
};

PS_LOOP find_largest(const float* in, int64_t numel, Largest* out) {
  uint32_t magnitudes[Vector::kWidth];
  uint32_t positives[Vector::kWidth];
  auto most = Vector::set_int(0);
  auto most_positive = Vector::set_int(0);
  int64_t i = 0;
  for (; i + Vector::kWidth <= numel; i += Vector::kWidth) {
    const auto x = Vector::load(in + i);
    most = Vector::max_int(most, Vector::bits(Vector::magnitude(x)));
    most_positive = Vector::max_int(most_positive, Vector::bits(x));  // as signed numbers
  }
  __builtin_memcpy(magnitudes, &most, sizeof(magnitudes));
  __builtin_memcpy(positives, &most_positive, sizeof(positives));
  Largest result;
  for (const uint32_t lane : magnitudes) result.magnitude = lane > result.magnitude ? lane : result.magnitude;
  for (const uint32_t lane : positives) result.positive = lane > result.positive ? lane : result.positive;
  for (; i < numel; ++i) {
    const uint32_t bits = bits_of(in[i]);
    const uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > result.magnitude) result.magnitude = magnitude;
    if (bits == magnitude && bits > result.positive) result.positive = bits;
  }
  *out = result;
}

template <template <class> class Codes>
PS_LOOP compress_block(const float* in, uint8_t* data, float* scale, int64_t numel) {
  Largest most;
  find_largest(in, numel, &most);
  if (most.magnitude < kLeastScaleBits || most.magnitude >= 0x7f800000u) {
    *scale = float_of(most.magnitude < kLeastScaleBits ? 0 : 0x7fc00000u);
    for (int64_t i = 0; i < numel; ++i) data[i] = 0;
    return;
  }
  *scale = float_of(most.magnitude == most.positive ? most.magnitude : most.magnitude | 0x80000000u);
  const float inverse = 1.0f / *scale;
  const Codes<Vector> codes;
  const Codes<ScalarLane> single;
  int64_t i = 0;
  for (; i + Vector::kWidth <= numel; i += Vector::kWidth) {
    const auto x = Vector::mul(Vector::load(in + i), Vector::set(inverse));
    Vector::store8(data + i, nearest_code<Vector, Codes>(codes, x));
  }
  for (; i < numel; ++i) {
    ScalarLane::store8(data + i, nearest_code<ScalarLane, Codes>(single, in[i] * inverse));
  }
}

template <class Bits>
PS_LOOP round_to_bf16(const float* in, uint16_t* out, int64_t numel, const RandomKey& key) {
  const RandomBits<Vector> random(key);
  const RandomBits<ScalarLane> single(key);
  const auto round = [&](auto lane, int64_t i, const auto& bits) PS_INLINE {
    using V = decltype(lane);
    const auto x = V::bits(V::quiet(V::load(in + i)));
    V::store16(out + i, V::upper(V::add_int(x, Bits::template of<V>(bits.states(i)))));
  };
  int64_t i = 0;
  for (; i + Vector::kWidth <= numel; i += Vector::kWidth) round(Vector(), i, random);
  for (; i < numel; ++i) round(ScalarLane(), i, single);
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

// A range of any length; `data` and `scales` are those of its first element.
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
        const float scale = scales[i / kStateBlock];
        if (type == StateType::kSigned8) {
          expand_block<SignedCodes>(codes + i, scale, out + i, size);
        } else {
          expand_block<UnsignedCodes>(codes + i, scale, out + i, size);
        }
      }
      return;
    case StateType::kLowerHalf:
    case StateType::kNone:
      return;
  }
}

template <class Bits>
inline void compress(const float* in, StateType type, void* out, float* scales, int64_t numel, const RandomKey& key) {
  auto* codes = static_cast<uint8_t*>(out);
  switch (type) {
    case StateType::kFloat32:
      return expand_loop<DType::kFloat32>(in, static_cast<float*>(out), numel);
    case StateType::kBFloat16:
      return round_to_bf16<Bits>(in, static_cast<uint16_t*>(out), numel, key);
    case StateType::kSigned8:
    case StateType::kUnsigned8:
      for (int64_t i = 0; i < numel; i += kStateBlock) {
        const int64_t size = numel - i < kStateBlock ? numel - i : kStateBlock;
        if (type == StateType::kSigned8) {
          compress_block<SignedCodes>(in + i, codes + i, scales + i / kStateBlock, size);
        } else {
          compress_block<UnsignedCodes>(in + i, codes + i, scales + i / kStateBlock, size);
        }
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
  with_ieee_arithmetic([&] { compress<UpperBits>(in, type, out, scales, numel, key); });
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
