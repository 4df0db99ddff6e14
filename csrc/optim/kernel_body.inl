// The leaf kernels, written once. Each cpu_<isa>.cpp includes this inside its anonymous namespace, after
// scalar_lane.inl and a definition of `Vector`: kWidth floats with the interface of ScalarLane.
// What is computed: [Note: one order of operations] and [Note: one order of summation] in kernels.h.
// What may be included or emitted: [Note: ISA files] in cpu_isa.h.
//
// NaN: which payload an x86 operation passes on depends on the order of its operands, and CUDA passes on
// none. So that bits are equal everywhere, every NaN that arithmetic yields is stored as 0x7fc00000 (binary32)
// or 0x7ff8000000000000 (binary64). Widening casts and binary32 copies do no arithmetic and keep payloads.
//
// [Note: skewed streams] Adam is bound by memory: it reads and writes 14 bytes per element. Its streams
// start in the same place of their arrays, and where arrays lie at equal offsets within a large power of
// two (chunks do), all streams then ask for the same few memory channels at once (so we think: distances
// that differ by 256 bytes end it). So the three updates run apart: momentum is kSkew elements ahead of
// variance, and variance kSkew ahead of the parameter. Each re-reads the gradient from the first-level
// cache; the arithmetic per element is the same.
//
// Measured: bf16 gradient replaced by bf16 parameter, 64 Mi elements on huge pages, 2 cores of an AMD EPYC (Zen 4),
// AVX-512, medians of 11 interleaved runs, ns per element, for arrays whose distances are multiples of 256 MiB / the
// same plus 64 B / plus 4 KiB. (memcpy moved 43 GB/s: 28 B in 0.65 ns. One multiplication instead of Adam: 0.55 to
// 0.58, so the last line is what memory allows.)
//   one loop, no prefetch                       0.84 / 0.81 / 0.53
//   one loop, prefetch 2 KiB ahead              0.83 / 0.80 / 0.53   0.5 to 8 KiB, PREFETCHW, locality 0: no different
//   one loop, prefetch staggered over streams   0.75 to 0.79 / - / 0.53   by 256 B to 4 KiB
//   one loop, prefetch in bursts per stream     0.74 to 0.81 / - / 0.52 to 0.8   of 512 to 8192 elements
//   three loops over a tile                     0.67 to 0.74 / 0.69 / 0.54 to 0.67   of 256 to 8192 elements
//   skew of 128, no prefetch                    0.68 / 0.69 / 0.59
//   skew of 128, prefetch 0.5, 1, 2 KiB ahead   0.53, 0.53, 0.53 / 0.58, 0.61, 0.59 / 0.52, 0.52, 0.53
//   skew of 64, 128, 256, prefetch 0.5 KiB      0.55, 0.53, 0.56 / 0.62, 0.58, 0.61 / 0.54, 0.52, 0.57
// Later, in pieces of 512 Ki elements that threads take in turn, a skew of 128, prefetch 0.25, 0.5, 1, 2, 4 KiB ahead,
// ns per element: 2 cores of a Xeon: whole update 0.380, 0.371, 0.359, 0.348, 0.353, parameter alone 0.356, 0.354,
// 0.335, 0.338, 0.388; 15 threads of a Xeon (Sapphire Rapids): 0.207, 0.204, 0.196, 0.194, 0.193 and 0.145, 0.143,
// 0.137,
// 0.135, 0.133. Cached stores of the parameter: 5 to 10 % slower.
// When the neighbours on the machine are quiet, everything is up to 1.7 times as fast; the order stays. Threads that
// take turns at tiles of 4 to 64 Ki elements instead of halves: no better. Non-temporal stores: 5 % better for a
// 16-bit parameter that has a buffer of its own; 15 to 20 % worse in place for the three float arrays.

#define PS_LOOP __attribute__((noinline)) void
#define PS_STEP inline __attribute__((always_inline)) void
#define PS_INLINE __attribute__((always_inline))
#define PS_FLOATS inline __attribute__((always_inline)) float*
#define PS_FLOAT inline __attribute__((always_inline)) typename V::Float
#define PS_INT inline __attribute__((always_inline)) typename V::Int

template <class V, DType kType>
inline __attribute__((always_inline)) typename V::Float load(const void* base, int64_t i) {
  const auto* p = static_cast<const typename Storage<kType>::Element*>(base) + i;
  if constexpr (kType == DType::kFloat32) {
    return V::load(p);
  } else if constexpr (kType == DType::kBFloat16) {
    return V::load_bf16(p);
  } else {
    return V::load_f16(p);
  }
}

template <class V, DType kType>
PS_STEP store(void* base, int64_t i, typename V::Float x) {
  auto* p = static_cast<typename Storage<kType>::Element*>(base) + i;
  if constexpr (kType == DType::kFloat32) {
    V::store(p, x);
  } else if constexpr (kType == DType::kBFloat16) {
    V::store16(p, V::to_bf16(x));
  } else {
    V::store16(p, V::to_f16(x));
  }
}

template <class V, DType kType>
PS_STEP stream(void* base, int64_t i, typename V::Float x) {
  if constexpr (kType == DType::kFloat32) {
    store<V, kType>(base, i, x);
  } else {
    auto* p = static_cast<uint16_t*>(base) + i;
    V::stream16(p, kType == DType::kBFloat16 ? V::to_bf16(x) : V::to_f16(x));
  }
}

// Calls step(lane, i) for i in [begin, end): whole vectors first, then single elements.
template <class Step>
PS_STEP for_range(int64_t begin, int64_t end, const Step& step) {
  int64_t i = begin;
  for (; i + Vector::kWidth <= end; i += Vector::kWidth) step(Vector(), i);
  for (; i < end; ++i) step(ScalarLane(), i);
}

// ---- States of fewer bytes ---------------------------------------------------------------------------

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

// ---- Adam ----------------------------------------------------------------------------------------

enum class ParamStore { kNone, kCached, kStreaming };

// Of float32, as all loops over moments read and write them.
PS_FLOATS momentum_of(const AdamRange& r) { return static_cast<float*>(r.momentum); }
PS_FLOATS variance_of(const AdamRange& r) { return static_cast<float*>(r.variance); }

// Elements per turn of the main loop: whole cache lines of each stream.
constexpr int64_t kStride = 32;
// Both from the table at the top.
constexpr int64_t kSkew = 128;
constexpr int64_t kPrefetchBytes = 2048;
// A shorter range stays in the cache, from where the next reader of the parameter takes it.
constexpr int64_t kMinStreaming = 1 << 16;

template <class V>
struct AdamConstants {
  typename V::Float grad_scale, weight_decay, decay, beta2, one_minus_beta1, one_minus_beta2;
  typename V::Float inv_sqrt_bias_correction2, eps, minus_step_size;

  explicit AdamConstants(const AdamScalars& s)
      : grad_scale(V::set(s.grad_scale)),
        weight_decay(V::set(s.weight_decay)),
        decay(V::set(s.decay)),
        beta2(V::set(s.beta2)),
        one_minus_beta1(V::set(s.one_minus_beta1)),
        one_minus_beta2(V::set(s.one_minus_beta2)),
        inv_sqrt_bias_correction2(V::set(s.inv_sqrt_bias_correction2)),
        eps(V::set(s.eps)),
        minus_step_size(V::set(-s.step_size)) {}
};

// The lines that kStride elements of kSize bytes take, at the distance of the floats beside them.
template <int64_t kSize>
PS_STEP prefetch_lines(const void* first) {
  const auto* lines = static_cast<const char*>(first) + kPrefetchBytes * kSize / 4;
  for (int64_t k = 0; k < kStride * kSize; k += 64) __builtin_prefetch(lines + k);
}

// Where the float32 master and the variance are: in arrays of their own,
struct WholeMaster {
  template <class V>
  static inline __attribute__((always_inline)) typename V::Float load(const AdamRange& r, int64_t i) {
    return V::load(static_cast<const float*>(r.master) + i);
  }
  template <class V>
  static inline __attribute__((always_inline)) typename V::Float variance(typename V::Float stored) {
    return stored;
  }
  // What is stored of a new variance while the master is still old.
  template <class V>
  static inline __attribute__((always_inline)) typename V::Float next_variance(typename V::Float x,
                                                                               typename V::Float /*stored*/) {
    return x;
  }
  template <class V, DType kParam, class States>
  static PS_STEP put(const AdamRange& r, int64_t i, ParamStore param_store, States& states, typename V::Float p) {
    states.template put_master<V>(r, i, p);
    if (param_store == ParamStore::kCached) store<V, kParam>(r.param, i, p);
    if (param_store == ParamStore::kStreaming) stream<V, kParam>(r.param, i, p);
  }
  static PS_STEP prefetch(const AdamRange& r, int64_t i) { prefetch_lines<4>(static_cast<const float*>(r.master) + i); }
};

// or [Note: split masters] in parameter, lower half and the variance's sign, which is the old master's until that is
// updated.
struct SplitMaster {
  template <class V>
  static inline __attribute__((always_inline)) typename V::Float load(const AdamRange& r, int64_t i) {
    return V::join(static_cast<const uint16_t*>(r.param) + i, static_cast<const uint16_t*>(r.master) + i,
                   V::load(variance_of(r) + i));
  }
  template <class V>
  static inline __attribute__((always_inline)) typename V::Float variance(typename V::Float stored) {
    return V::magnitude(stored);
  }
  template <class V>
  static inline __attribute__((always_inline)) typename V::Float next_variance(typename V::Float x,
                                                                               typename V::Float stored) {
    return V::with_sign(x, stored);
  }
  template <class V, DType kParam, class States>
  static PS_STEP put(const AdamRange& r, int64_t i, ParamStore, States&, typename V::Float p) {
    V::store16(static_cast<uint16_t*>(r.param) + i, V::to_bf16(p));
    V::store16(static_cast<uint16_t*>(r.master) + i, V::lower(p));
    V::store(variance_of(r) + i, V::with_sign(V::magnitude(V::load(variance_of(r) + i)), V::tie(p)));
  }
  static PS_STEP prefetch(const AdamRange& r, int64_t i) {
    prefetch_lines<2>(static_cast<const uint16_t*>(r.param) + i);
    prefetch_lines<2>(static_cast<const uint16_t*>(r.master) + i);
  }
};

// Where new states go, and where the parameter's update finds its moments again: in the old ones' place,
struct StatesInPlace {
  template <class V>
  PS_STEP put_momentum(const AdamRange& r, int64_t i, typename V::Float x) {
    V::store(momentum_of(r) + i, x);
  }
  template <class V>
  PS_STEP put_variance(const AdamRange& r, int64_t i, typename V::Float x) {
    V::store(variance_of(r) + i, x);
  }
  template <class V>
  PS_STEP put_master(const AdamRange& r, int64_t i, typename V::Float x) {
    V::store(static_cast<float*>(r.master) + i, x);
  }
  const float* momentum(const AdamRange& r, int64_t i) const { return momentum_of(r) + i; }
  const float* variance(const AdamRange& r, int64_t i) const { return variance_of(r) + i; }
};

// or in a ring that stays in the first-level cache, while new states go nowhere: the parameter alone is wanted. Vectors
// start at multiples of their width, so none wraps around in it.
struct StatesUnwritten {
  static constexpr int64_t kRing = 512;
  alignas(64) float momentum_ring[kRing];
  alignas(64) float variance_ring[kRing];

  template <class V>
  PS_STEP put_momentum(const AdamRange&, int64_t i, typename V::Float x) {
    V::store(momentum_ring + i % kRing, x);
  }
  template <class V>
  PS_STEP put_variance(const AdamRange&, int64_t i, typename V::Float x) {
    V::store(variance_ring + i % kRing, x);
  }
  template <class V>
  PS_STEP put_master(const AdamRange&, int64_t, typename V::Float) {}
  const float* momentum(const AdamRange&, int64_t i) const { return momentum_ring + i % kRing; }
  const float* variance(const AdamRange&, int64_t i) const { return variance_ring + i % kRing; }
};
static_assert(StatesUnwritten::kRing >= 2 * kSkew + 2 * kStride);

// or apart from the old ones too. Memory is written past the cache (a store that first reads its line costs half as
// much again; so this takes as long as in place).
template <bool kStreaming>
struct StatesApart : StatesUnwritten {
  template <class V>
  static PS_STEP put(float* to, typename V::Float x) {
    if constexpr (kStreaming) {
      V::stream(to, x);
    } else {
      V::store(to, x);
    }
  }
  template <class V>
  PS_STEP put_momentum(const AdamRange& r, int64_t i, typename V::Float x) {
    StatesUnwritten::put_momentum<V>(r, i, x);
    put<V>(static_cast<float*>(r.new_momentum) + i, x);
  }
  template <class V>
  PS_STEP put_variance(const AdamRange& r, int64_t i, typename V::Float x) {
    StatesUnwritten::put_variance<V>(r, i, x);
    put<V>(static_cast<float*>(r.new_variance) + i, x);
  }
  template <class V>
  PS_STEP put_master(const AdamRange& r, int64_t i, typename V::Float x) {
    put<V>(r.new_master + i, x);
  }
};

// The three updates of one element run in this order, the first two while the master is still old.
template <class V, DType kGrad, class Master>
inline __attribute__((always_inline)) typename V::Float gradient(const AdamRange& r, const AdamConstants<V>& c,
                                                                 int64_t i) {
  const auto g = V::mul(load<V, kGrad>(r.grad, i), c.grad_scale);
  return V::fma(c.weight_decay, Master::template load<V>(r, i), g);
}

template <class V, DType kGrad, class Master, class States>
PS_STEP update_momentum(const AdamRange& r, const AdamConstants<V>& c, int64_t i, States& states) {
  const auto g = gradient<V, kGrad, Master>(r, c, i);
  const auto m = V::load(momentum_of(r) + i);
  states.template put_momentum<V>(r, i, V::quiet(V::fma(c.one_minus_beta1, V::sub(g, m), m)));
}

template <class V, DType kGrad, class Master, class States>
PS_STEP update_variance(const AdamRange& r, const AdamConstants<V>& c, int64_t i, States& states) {
  const auto g = gradient<V, kGrad, Master>(r, c, i);
  const auto stored = V::load(variance_of(r) + i);
  const auto v = V::mul(c.beta2, Master::template variance<V>(stored));
  const auto next = V::quiet(V::fma(V::mul(c.one_minus_beta2, g), g, v));
  states.template put_variance<V>(r, i, Master::template next_variance<V>(next, stored));
}

template <class V, DType kParam, class Master, class States>
PS_STEP update_param(const AdamRange& r, const AdamConstants<V>& c, int64_t i, ParamStore param_store, States& states) {
  auto p = V::mul(Master::template load<V>(r, i), c.decay);
  const auto v = Master::template variance<V>(V::load(states.variance(r, i)));
  const auto d = V::fma(V::sqrt(v), c.inv_sqrt_bias_correction2, c.eps);
  p = V::quiet(V::fma(c.minus_step_size, V::div(V::load(states.momentum(r, i)), d), p));
  Master::template put<V, kParam>(r, i, param_store, states, p);
}

// `i` is the element whose momentum is updated next; the other streams are asked for at the same distance
// from there, so the reads too are kSkew apart.
template <DType kGrad, class Master>
PS_STEP prefetch(const AdamRange& r, int64_t i) {
  constexpr int64_t kLine = 64;
  constexpr int64_t kSkewBytes = kSkew * 4;
  Master::prefetch(r, i);
  const auto* momentum = reinterpret_cast<const char*>(momentum_of(r) + i) + kPrefetchBytes + kSkewBytes;
  const auto* variance = reinterpret_cast<const char*>(variance_of(r) + i) + kPrefetchBytes + 2 * kSkewBytes;
  const auto* grad = reinterpret_cast<const char*>(static_cast<const typename Storage<kGrad>::Element*>(r.grad) + i);
  for (int64_t k = 0; k < kStride * 4; k += kLine) {
    __builtin_prefetch(momentum + k);
    __builtin_prefetch(variance + k);
  }
  for (int64_t k = 0; k < kStride * static_cast<int64_t>(sizeof(typename Storage<kGrad>::Element)); k += kLine) {
    __builtin_prefetch(grad + kPrefetchBytes + k);
  }
}

// See [Note: skewed streams]. The three are called as update(lane, i, constants), for all elements of `r`.
template <DType kGrad, class Master, class Momentum, class Variance, class Param>
PS_STEP skewed_loop(const AdamRange& r, const AdamScalars& scalars, const Momentum& momentum, const Variance& variance,
                    const Param& param) {
  const AdamConstants<Vector> c(scalars);
  const auto at_the_ends = [&scalars](const auto& update) {
    return [&](auto lane, int64_t i) { update(lane, i, AdamConstants<decltype(lane)>(scalars)); };
  };
  const int64_t ahead = r.numel < 2 * kSkew ? r.numel : 2 * kSkew;
  const int64_t middle = r.numel < kSkew ? r.numel : kSkew;
  const int64_t skewed = (r.numel - ahead) / kStride * kStride;
  for_range(0, ahead, at_the_ends(momentum));
  for_range(0, middle, at_the_ends(variance));
  for (int64_t i = 0; i < skewed; i += kStride) {
    prefetch<kGrad, Master>(r, i + 2 * kSkew);
#pragma GCC unroll 4
    for (int64_t k = i; k < i + kStride; k += Vector::kWidth) {
      momentum(Vector(), k + 2 * kSkew, c);
      variance(Vector(), k + kSkew, c);
      param(Vector(), k, c);
    }
  }
  for_range(skewed + ahead, r.numel, at_the_ends(momentum));
  for_range(skewed + middle, r.numel, at_the_ends(variance));
  for_range(skewed, r.numel, at_the_ends(param));
}

template <DType kGrad, DType kParam, class Master, class States>
PS_LOOP adam_loop(const AdamRange& range, const AdamScalars& scalars, ParamStore param_store) {
  const AdamRange r = range;
  States states;
  skewed_loop<kGrad, Master>(
      r, scalars,
      [&](auto lane, int64_t i, const auto& c)
          PS_INLINE { update_momentum<decltype(lane), kGrad, Master>(r, c, i, states); },
      [&](auto lane, int64_t i, const auto& c)
          PS_INLINE { update_variance<decltype(lane), kGrad, Master>(r, c, i, states); },
      [&](auto lane, int64_t i, const auto& c)
          PS_INLINE { update_param<decltype(lane), kParam, Master>(r, c, i, param_store, states); });
}

// [Note: settled values] What 16-bit values are at both ends of the gradients' scales. Roots and quotients are bounded
// by the processor's approximations, moved outwards by more than their errors and that of the roundings between: the
// exact ones take as long as memory does. Where bounds of the denominator are no numbers of ordinary size, the value is
// open.
template <DType kHalf>
struct BetweenScales {
  static constexpr float kLeastSquare = 0x1p-120f;
  static constexpr float kLeastDenominator = 0x1p-100f;
  static constexpr float kMostDenominator = 0x1p100f;

  AdamRange r;
  const float most_grad_scale;
  const ParamStore param_store;
  const OpenValues open;
  int64_t range_begin = 0;  // of `r`, in the piece
  int64_t count = 0;
  bool is_full = false;
  StatesUnwritten at_least, at_most;

  BetweenScales(const AdamRange& range, float most, ParamStore store, const OpenValues& to)
      : r(range), most_grad_scale(most), param_store(store), open(to) {}

  template <class V>
  PS_STEP momentum(const AdamConstants<V>& c, int64_t i) {
    const auto g = load<V, kHalf>(r.grad, i);
    const auto m = V::load(momentum_of(r) + i);
    const auto at = [&](typename V::Float scale)
                        PS_INLINE { return V::fma(c.one_minus_beta1, V::sub(V::mul(g, scale), m), m); };
    at_least.put_momentum<V>(r, i, at(c.grad_scale));
    at_most.put_momentum<V>(r, i, at(V::set(most_grad_scale)));
  }
  template <class V>
  PS_STEP variance(const AdamConstants<V>& c, int64_t i) {
    const auto g = load<V, kHalf>(r.grad, i);
    const auto v = V::mul(c.beta2, V::load(variance_of(r) + i));
    const auto at = [&](typename V::Float scale) PS_INLINE {
      const auto scaled = V::mul(g, scale);
      return V::fma(V::mul(c.one_minus_beta2, scaled), scaled, v);
    };
    at_least.put_variance<V>(r, i, at(c.grad_scale));
    at_most.put_variance<V>(r, i, at(V::set(most_grad_scale)));
  }
  template <class V>
  PS_STEP param(const AdamConstants<V>& c, int64_t i) {
    const auto less = V::set(1 - 2 * V::kNearError);
    const auto more = V::set(1 + 2 * V::kNearError);
    const auto m0 = V::load(at_least.momentum(r, i));
    const auto m1 = V::load(at_most.momentum(r, i));
    const auto v0 = V::load(at_least.variance(r, i));
    const auto v1 = V::max(V::load(at_most.variance(r, i)), V::set(kLeastSquare));
    // A square below the least has a smaller root than the product of it and the least one's inverse root.
    const auto root0 = V::mul(v0, V::near_inverse_sqrt(V::max(v0, V::set(kLeastSquare))));
    const auto root1 = V::mul(v1, V::near_inverse_sqrt(v1));
    const auto d0 = V::fma(root0, V::mul(c.inv_sqrt_bias_correction2, less), c.eps);
    const auto d1 = V::fma(root1, V::mul(c.inv_sqrt_bias_correction2, more), c.eps);
    const auto most_inverse = V::mul(V::near_inverse(d0), more);
    const auto least_inverse = V::mul(V::near_inverse(d1), less);
    const auto low_m = V::min(m0, m1);
    const auto high_m = V::max(m0, m1);
    const auto low_q = V::mul(low_m, V::by_sign(low_m, most_inverse, least_inverse));
    const auto high_q = V::mul(high_m, V::by_sign(high_m, least_inverse, most_inverse));
    const auto p = V::mul(V::load(static_cast<const float*>(r.master) + i), c.decay);
    const auto low_p = V::fma(c.minus_step_size, high_q, p);
    const auto high_p = V::fma(c.minus_step_size, low_q, p);
    if (param_store == ParamStore::kCached) store<V, kHalf>(r.param, i, low_p);
    if (param_store == ParamStore::kStreaming) stream<V, kHalf>(r.param, i, low_p);
    const unsigned unknown = V::unordered(m0, m1) | V::unordered(low_p, V::sub(p, p)) |
                             V::not_at_most(V::set(0.0f), v0) | V::not_at_most(V::set(kLeastDenominator), d0) |
                             V::not_at_most(d1, V::set(kMostDenominator));
    note_open(i, unknown | V::template differ<kHalf>(low_p, high_p));
  }
  // Of the lanes in the mask, while there is room.
  PS_STEP note_open(int64_t first, unsigned lanes) {
    for (; lanes != 0 && count < open.capacity; lanes &= lanes - 1) {
      const int64_t i = first + __builtin_ctz(lanes);
      open.master[count] = static_cast<const float*>(r.master)[i];
      open.momentum[count] = momentum_of(r)[i];
      open.variance[count] = variance_of(r)[i];
      open.grad[count] = static_cast<const uint16_t*>(r.grad)[i];
      open.index[count] = static_cast<uint16_t>(range_begin + i);
      ++count;
    }
    is_full |= lanes != 0;
  }
};

template <DType kHalf>
PS_LOOP between_loop(BetweenScales<kHalf>& steps, const AdamScalars& scalars) {
  skewed_loop<kHalf, WholeMaster>(
      steps.r, scalars, [&](auto, int64_t i, const auto& c) PS_INLINE { steps.momentum(c, i); },
      [&](auto, int64_t i, const auto& c) PS_INLINE { steps.variance(c, i); },
      [&](auto, int64_t i, const auto& c) PS_INLINE { steps.param(c, i); });
}

// Elements whose moments are expanded at a time.
constexpr int64_t kExpandedPiece = 4 * kStateBlock;

template <DType kHalf>
inline void run_between(const AdamRange& range, const AdamScalars& scalars, float most_grad_scale,
                        ParamStore param_store, OpenValues* open) {
  BetweenScales<kHalf> steps(range, most_grad_scale, param_store, *open);
  const bool whole = range.momentum_type == StateType::kFloat32 && range.variance_type == StateType::kFloat32;
  if (whole) {
    between_loop(steps, scalars);
  } else {
    alignas(64) float momentum[kExpandedPiece];
    alignas(64) float variance[kExpandedPiece];
    for (int64_t i = 0; i < range.numel; i += kExpandedPiece) {
      const int64_t numel = range.numel - i < kExpandedPiece ? range.numel - i : kExpandedPiece;
      expand(range.momentum_type, static_cast<const char*>(range.momentum) + bytes_to(range.momentum_type, i),
             range.momentum_scales + i / kStateBlock, momentum, numel);
      expand(range.variance_type, static_cast<const char*>(range.variance) + bytes_to(range.variance_type, i),
             range.variance_scales + i / kStateBlock, variance, numel);
      steps.range_begin = i;
      steps.r.master = static_cast<float*>(range.master) + i;
      steps.r.momentum = momentum;
      steps.r.variance = variance;
      steps.r.grad = static_cast<const uint16_t*>(range.grad) + i;
      steps.r.param = static_cast<uint16_t*>(range.param) + i;
      steps.r.numel = numel;
      between_loop(steps, scalars);
    }
  }
  open->count = steps.is_full ? OpenValues::kAll : steps.count;
}

// What adam_loop makes of open value `k` and those after it.
template <class V, DType kHalf>
inline __attribute__((always_inline)) typename V::Float open_param(const OpenValues& open, const AdamConstants<V>& c,
                                                                   int64_t k) {
  const auto p = V::load(open.master + k);
  const auto g = V::fma(c.weight_decay, p, V::mul(load<V, kHalf>(open.grad, k), c.grad_scale));
  const auto m = V::load(open.momentum + k);
  const auto next_m = V::fma(c.one_minus_beta1, V::sub(g, m), m);
  const auto v = V::fma(V::mul(c.one_minus_beta2, g), g, V::mul(c.beta2, V::load(open.variance + k)));
  const auto d = V::fma(V::sqrt(v), c.inv_sqrt_bias_correction2, c.eps);
  return V::quiet(V::fma(c.minus_step_size, V::div(next_m, d), V::mul(p, c.decay)));
}

// So many values ahead, the lines that their parameters go to are asked for.
constexpr int64_t kOpenAhead = 128;

template <DType kHalf>
PS_LOOP open_loop(const AdamRange& range, const AdamScalars& scalars, const OpenValues& values) {
  const OpenValues open = values;
  auto* const param = static_cast<uint16_t*>(range.param);
  const int64_t last = open.count - 1;
  for_range(0, open.count, [&](auto lane, int64_t k) {
    using V = decltype(lane);
    uint16_t made[V::kWidth];
    store<V, kHalf>(made, 0, open_param<V, kHalf>(open, AdamConstants<V>(scalars), k));
    for (int64_t j = k; j < k + V::kWidth; ++j) {
      __builtin_prefetch(param + open.index[j + kOpenAhead < last ? j + kOpenAhead : last], 1);
      param[open.index[j]] = made[j - k];
    }
  });
}

inline ParamStore choose_param_store(const AdamRange& r) {
  if (r.param == nullptr) return ParamStore::kNone;
  const bool aligned = reinterpret_cast<uintptr_t>(r.param) % 64 == 0;
  return r.param != r.grad && aligned && r.numel >= kMinStreaming ? ParamStore::kStreaming : ParamStore::kCached;
}

inline bool streams_states(const AdamRange& r) {
  const auto addresses = reinterpret_cast<uintptr_t>(r.new_master) | reinterpret_cast<uintptr_t>(r.new_momentum) |
                         reinterpret_cast<uintptr_t>(r.new_variance);
  return addresses % 64 == 0 && r.numel >= kMinStreaming;
}

template <class States>
inline void run_adam(const AdamRange& range, const AdamScalars& scalars, ParamStore param_store) {
  with_ieee_arithmetic([&] {
    with_dtype(range.grad_dtype, [&](auto grad) {
      with_dtype(range.param_dtype, [&](auto param) {
        adam_loop<grad.value, param.value, WholeMaster, States>(range, scalars, param_store);
      });
    });
  });
}

// Parameters are read, so their lines are in the cache.
inline void run_split_adam(const AdamRange& range, const AdamScalars& scalars) {
  with_ieee_arithmetic([&] {
    with_dtype(range.grad_dtype, [&](auto grad) {
      adam_loop<grad.value, DType::kBFloat16, SplitMaster, StatesInPlace>(range, scalars, ParamStore::kCached);
    });
  });
}

// ---- Adam with states of fewer bytes -------------------------------------------------------------------

// [Note: a block at a time] Moments of a block of states are expanded to the first-level cache (or stay where they are,
// being float32), the block is updated there in one loop, and moments are compressed. So every type of state goes with
// every type of gradient, parameter and master, and what is compiled is the sum of all these, not the product.
struct Tile {
  const float* momentum;
  const float* variance;
  float* next_momentum;
  float* next_variance;
  const void* master;
  void* next_master;  // null: masters are not written
  const void* grad;
  void* param;
  int64_t numel;
  RandomKey key;
  ParamStore param_store;
};

struct WholeTile {
  template <class V>
  static PS_FLOAT load(const Tile& t, int64_t i) {
    const auto* from = static_cast<const float*>(t.master) + i;
    __builtin_prefetch(from + kBlockAhead);
    return V::load(from);
  }
  template <class V>
  static PS_FLOAT variance(const Tile& t, int64_t i) {
    return V::load(t.variance + i);
  }
  template <class V>
  static PS_FLOAT stored_variance(typename V::Float v, typename V::Float /*p*/) {
    return v;
  }
  template <class V, DType kParam>
  static PS_STEP put(const Tile& t, int64_t i, typename V::Float p, const RandomBits<V>&) {
    if (t.next_master != nullptr) V::store(static_cast<float*>(t.next_master) + i, p);
    if (t.param_store == ParamStore::kCached) store<V, kParam>(t.param, i, p);
    if (t.param_store == ParamStore::kStreaming) stream<V, kParam>(t.param, i, p);
  }
};

// [Note: split masters]: with a float32 variance, whose sign is part of them,
struct SignedTile {
  template <class V>
  static PS_FLOAT load(const Tile& t, int64_t i) {
    const auto* upper = static_cast<const uint16_t*>(t.param) + i;
    const auto* lower = static_cast<const uint16_t*>(t.master) + i;
    __builtin_prefetch(upper + kBlockAhead);
    __builtin_prefetch(lower + kBlockAhead);
    return V::join(upper, lower, V::load(t.variance + i));
  }
  template <class V>
  static PS_FLOAT variance(const Tile& t, int64_t i) {
    return V::magnitude(V::load(t.variance + i));
  }
  template <class V>
  static PS_FLOAT stored_variance(typename V::Float v, typename V::Float p) {
    return V::with_sign(v, V::tie(p));
  }
  template <class V, DType kParam>
  static PS_STEP put(const Tile& t, int64_t i, typename V::Float p, const RandomBits<V>&) {
    V::store16(static_cast<uint16_t*>(t.param) + i, V::to_bf16(p));
    V::store16(static_cast<uint16_t*>(t.next_master) + i, V::lower(p));
  }
};

// or one of fewer bytes.
struct UnsignedTile {
  template <class V>
  static PS_FLOAT load(const Tile& t, int64_t i) {
    const auto* upper = static_cast<const uint16_t*>(t.param) + i;
    const auto* lower = static_cast<const uint16_t*>(t.master) + i;
    __builtin_prefetch(upper + kBlockAhead);
    __builtin_prefetch(lower + kBlockAhead);
    return V::join(upper, lower, V::set(0.0f));
  }
  template <class V>
  static PS_FLOAT variance(const Tile& t, int64_t i) {
    return V::load(t.variance + i);
  }
  template <class V>
  static PS_FLOAT stored_variance(typename V::Float v, typename V::Float /*p*/) {
    return v;
  }
  template <class V, DType kParam>
  static PS_STEP put(const Tile& t, int64_t i, typename V::Float p, const RandomBits<V>&) {
    V::store16(static_cast<uint16_t*>(t.param) + i, half_away<V>(p));
    V::store16(static_cast<uint16_t*>(t.next_master) + i, V::lower(p));
  }
};

// A bfloat16 parameter and no master.
struct BareTile {
  template <class V>
  static PS_FLOAT load(const Tile& t, int64_t i) {
    const auto* from = static_cast<const uint16_t*>(t.param) + i;
    __builtin_prefetch(from + kBlockAhead);
    return V::load_bf16(from);
  }
  template <class V>
  static PS_FLOAT variance(const Tile& t, int64_t i) {
    return V::load(t.variance + i);
  }
  template <class V>
  static PS_FLOAT stored_variance(typename V::Float v, typename V::Float /*p*/) {
    return v;
  }
  template <class V, DType kParam>
  static PS_STEP put(const Tile& t, int64_t i, typename V::Float p, const RandomBits<V>& random) {
    V::store16(static_cast<uint16_t*>(t.param) + i, V::upper(V::add_int(V::bits(p), random.param(i))));
  }
};

template <class V, DType kGrad, DType kParam, class Master>
PS_STEP update_tile_at(const Tile& t, const AdamConstants<V>& c, const RandomBits<V>& random, int64_t i) {
  const auto* grad = static_cast<const typename Storage<kGrad>::Element*>(t.grad) + i;
  __builtin_prefetch(grad + kBlockAhead);
  auto p = Master::template load<V>(t, i);
  const auto g = V::fma(c.weight_decay, p, V::mul(load<V, kGrad>(grad, 0), c.grad_scale));
  const auto old_m = V::load(t.momentum + i);
  const auto m = V::quiet(V::fma(c.one_minus_beta1, V::sub(g, old_m), old_m));
  const auto old_v = V::mul(c.beta2, Master::template variance<V>(t, i));
  const auto v = V::quiet(V::fma(V::mul(c.one_minus_beta2, g), g, old_v));
  const auto d = V::fma(V::sqrt(v), c.inv_sqrt_bias_correction2, c.eps);
  p = V::quiet(V::fma(c.minus_step_size, V::div(m, d), V::mul(p, c.decay)));
  V::store(t.next_momentum + i, m);
  V::store(t.next_variance + i, Master::template stored_variance<V>(v, p));
  Master::template put<V, kParam>(t, i, p, random);
}

template <DType kGrad, DType kParam, class Master>
PS_LOOP update_tile(const Tile& tile, const AdamScalars& scalars) {
  const Tile t = tile;
  const AdamConstants<Vector> c(scalars);
  const RandomBits<Vector> random(t.key);
  int64_t i = 0;
  for (; i + Vector::kWidth <= t.numel; i += Vector::kWidth) {
    update_tile_at<Vector, kGrad, kParam, Master>(t, c, random, i);
  }
  if (i == t.numel) return;
  const AdamConstants<ScalarLane> single(scalars);
  const RandomBits<ScalarLane> single_random(t.key);
  for (; i < t.numel; ++i) update_tile_at<ScalarLane, kGrad, kParam, Master>(t, single, single_random, i);
}

template <class Scalars>
using UpdateTile = void (*)(const Tile& tile, const Scalars& scalars);

inline UpdateTile<AdamScalars> choose_update_tile(const AdamRange& range) {
  UpdateTile<AdamScalars> update = nullptr;
  with_dtype(range.grad_dtype, [&](auto grad) {
    constexpr DType kHalf = DType::kBFloat16;
    if (range.master_type == StateType::kNone) {
      update = update_tile<grad.value, kHalf, BareTile>;
    } else if (range.master_type != StateType::kLowerHalf) {
      with_dtype(range.param_dtype, [&](auto param) { update = update_tile<grad.value, param.value, WholeTile>; });
    } else if (range.variance_type == StateType::kFloat32) {
      update = update_tile<grad.value, kHalf, SignedTile>;
    } else {
      update = update_tile<grad.value, kHalf, UnsignedTile>;
    }
  });
  return update;
}

// One moment, from block to block.
struct TileMoment {
  StateType type;
  const void* from;
  const float* from_scales;
  void* to;  // null: it is not written
  float* to_scales;
  alignas(64) float expanded[kStateBlock];

  bool is_float() const { return type == StateType::kFloat32; }
  const float* expand_at(int64_t i, int64_t numel) {
    if (is_float()) return static_cast<const float*>(from) + i;
    expand(type, static_cast<const char*>(from) + bytes_to(type, i), from_scales + i / kStateBlock, expanded, numel);
    return expanded;
  }
  float* next_at(int64_t i) { return is_float() && to != nullptr ? static_cast<float*>(to) + i : expanded; }
  template <class Bits>
  void compress_at(int64_t i, int64_t numel, const RandomKey& key) {
    if (is_float() || to == nullptr) return;
    compress<Bits>(expanded, type, state_at(to, type, i), to_scales + i / kStateBlock, numel, key);
  }
};

enum class Writes { kParam, kAll };

template <class Scalars>
inline void run_tiles(const AdamRange& r, UpdateTile<Scalars> update, const Scalars& scalars, Writes writes) {
  const bool apart = r.new_master != nullptr;
  const bool all = writes == Writes::kAll;
  TileMoment momentum, variance;
  momentum.type = r.momentum_type;
  momentum.from = r.momentum;
  momentum.from_scales = r.momentum_scales;
  momentum.to = !all ? nullptr : apart ? r.new_momentum : r.momentum;
  momentum.to_scales = apart ? r.new_momentum_scales : r.momentum_scales;
  variance.type = r.variance_type;
  variance.from = r.variance;
  variance.from_scales = r.variance_scales;
  variance.to = !all ? nullptr : apart ? r.new_variance : r.variance;
  variance.to_scales = apart ? r.new_variance_scales : r.variance_scales;
  void* const next_master = !all ? nullptr : apart ? r.new_master : r.master;
  const int64_t grad_size = r.grad_dtype == DType::kFloat32 ? 4 : 2;
  const int64_t param_size = r.param_dtype == DType::kFloat32 ? 4 : 2;
  const ParamStore param_store = choose_param_store(r);
  with_ieee_arithmetic([&] {
    for (int64_t i = 0; i < r.numel; i += kStateBlock) {
      const int64_t numel = r.numel - i < kStateBlock ? r.numel - i : kStateBlock;
      const RandomKey key{r.key.a, r.key.b, r.key.first + i};
      const Tile tile{momentum.expand_at(i, numel),
                      variance.expand_at(i, numel),
                      momentum.next_at(i),
                      variance.next_at(i),
                      state_at(r.master, r.master_type, i),
                      state_at(next_master, r.master_type, i),
                      static_cast<const char*>(r.grad) + i * grad_size,
                      r.param == nullptr ? nullptr : static_cast<char*>(r.param) + i * param_size,
                      numel,
                      key,
                      param_store};
      update(tile, scalars);
      momentum.compress_at<UpperBits>(i, numel, key);
      variance.compress_at<LowerBits>(i, numel, key);
    }
  });
  Vector::end_stream();
}

inline bool are_moments_whole(const AdamRange& range) {
  return range.momentum_type == StateType::kFloat32 && range.variance_type == StateType::kFloat32;
}

void adam(const AdamRange& range, const AdamScalars& scalars) {
  if (!are_moments_whole(range) || range.master_type == StateType::kNone) {
    return run_tiles(range, choose_update_tile(range), scalars, Writes::kAll);
  }
  if (range.master_type == StateType::kLowerHalf) return run_split_adam(range, scalars);
  const ParamStore param_store = choose_param_store(range);
  if (range.new_master == nullptr) {
    run_adam<StatesInPlace>(range, scalars, param_store);
  } else if (streams_states(range)) {
    run_adam<StatesApart<true>>(range, scalars, param_store);
  } else {
    run_adam<StatesApart<false>>(range, scalars, param_store);
  }
  Vector::end_stream();
}

void adam_param(const AdamRange& range, const AdamScalars& scalars) {
  if (!are_moments_whole(range)) return run_tiles(range, choose_update_tile(range), scalars, Writes::kParam);
  run_adam<StatesUnwritten>(range, scalars, choose_param_store(range));
  Vector::end_stream();
}

template <class Body>
inline void with_half(DType dtype, const Body& body) {
  if (dtype == DType::kBFloat16) return body(Tag<DType::kBFloat16>());
  body(Tag<DType::kFloat16>());
}

void adam_param_between(const AdamRange& range, const AdamScalars& scalars, float most_grad_scale, OpenValues* open) {
  open->count = OpenValues::kAll;
  if (scalars.weight_decay != 0) return;
  with_ieee_arithmetic([&] {
    with_half(range.param_dtype, [&](auto half) {
      run_between<half.value>(range, scalars, most_grad_scale, choose_param_store(range), open);
    });
  });
  Vector::end_stream();
}

void adam_param_open(const AdamRange& range, const AdamScalars& scalars, const OpenValues& open) {
  if (open.count == OpenValues::kAll) return adam_param(range, scalars);
  with_ieee_arithmetic(
      [&] { with_half(range.param_dtype, [&](auto half) { open_loop<half.value>(range, scalars, open); }); });
}

// ---- Optimizers of one moment ------------------------------------------------------------------------

template <class V>
struct MomentumConstants {
  typename V::Float grad_scale, weight_decay, decay, minus_step_size;
  typename V::Float one_minus_beta1, one_minus_beta2, momentum_factor, one_minus_dampening;

  explicit MomentumConstants(const MomentumScalars& s)
      : grad_scale(V::set(s.grad_scale)),
        weight_decay(V::set(s.weight_decay)),
        decay(V::set(s.decay)),
        minus_step_size(V::set(-s.step_size)),
        one_minus_beta1(V::set(s.one_minus_beta1)),
        one_minus_beta2(V::set(s.one_minus_beta2)),
        momentum_factor(V::set(s.momentum_factor)),
        one_minus_dampening(V::set(s.one_minus_dampening)) {}
};

// 0 of zeros; NaN of what is not finite, as its product with 0 is.
template <class V>
PS_FLOAT sign_of(typename V::Float x) {
  const auto sign = V::and_int(V::bits(x), V::set_int(0x80000000u));
  const auto one = V::floats(V::xor_int(V::bits(V::set(1.0f)), sign));
  return V::where_nonzero(V::bits(V::magnitude(x)), V::add(one, V::mul(x, V::set(0.0f))));
}

template <class V, MomentumRule kRule, DType kGrad, DType kParam, class Master>
PS_STEP momentum_tile_at(const Tile& t, const MomentumConstants<V>& c, const RandomBits<V>& random, int64_t i) {
  const auto* grad = static_cast<const typename Storage<kGrad>::Element*>(t.grad) + i;
  __builtin_prefetch(grad + kBlockAhead);
  const auto p = Master::template load<V>(t, i);
  const auto g = V::fma(c.weight_decay, p, V::mul(load<V, kGrad>(grad, 0), c.grad_scale));
  const auto old_m = V::load(t.momentum + i);
  auto m = old_m;
  auto update = old_m;
  if constexpr (kRule == MomentumRule::kLion) {
    const auto distance = V::sub(g, old_m);
    m = V::quiet(V::fma(c.one_minus_beta2, distance, old_m));
    update = sign_of<V>(V::fma(c.one_minus_beta1, distance, old_m));
  } else {
    m = V::quiet(V::fma(c.one_minus_dampening, g, V::mul(c.momentum_factor, old_m)));
    update = kRule == MomentumRule::kNesterov ? V::fma(c.momentum_factor, m, g) : m;
  }
  V::store(t.next_momentum + i, m);
  Master::template put<V, kParam>(t, i, V::quiet(V::fma(c.minus_step_size, update, V::mul(p, c.decay))), random);
}

template <MomentumRule kRule, DType kGrad, DType kParam, class Master>
PS_LOOP momentum_tile(const Tile& tile, const MomentumScalars& scalars) {
  const Tile t = tile;
  const MomentumConstants<Vector> c(scalars);
  const RandomBits<Vector> random(t.key);
  int64_t i = 0;
  for (; i + Vector::kWidth <= t.numel; i += Vector::kWidth) {
    momentum_tile_at<Vector, kRule, kGrad, kParam, Master>(t, c, random, i);
  }
  if (i == t.numel) return;
  const MomentumConstants<ScalarLane> single(scalars);
  const RandomBits<ScalarLane> single_random(t.key);
  for (; i < t.numel; ++i) {
    momentum_tile_at<ScalarLane, kRule, kGrad, kParam, Master>(t, single, single_random, i);
  }
}

template <MomentumRule kRule>
inline UpdateTile<MomentumScalars> choose_momentum_tile(const AdamRange& range) {
  UpdateTile<MomentumScalars> update = nullptr;
  with_dtype(range.grad_dtype, [&](auto grad) {
    constexpr DType kHalf = DType::kBFloat16;
    if (range.master_type == StateType::kNone) {
      update = momentum_tile<kRule, grad.value, kHalf, BareTile>;
    } else if (range.master_type == StateType::kLowerHalf) {
      update = momentum_tile<kRule, grad.value, kHalf, UnsignedTile>;
    } else {
      with_dtype(range.param_dtype,
                 [&](auto param) { update = momentum_tile<kRule, grad.value, param.value, WholeTile>; });
    }
  });
  return update;
}

inline UpdateTile<MomentumScalars> choose_momentum_tile(MomentumRule rule, const AdamRange& range) {
  switch (rule) {
    case MomentumRule::kLion:
      return choose_momentum_tile<MomentumRule::kLion>(range);
    case MomentumRule::kSgd:
      return choose_momentum_tile<MomentumRule::kSgd>(range);
    case MomentumRule::kNesterov:
      return choose_momentum_tile<MomentumRule::kNesterov>(range);
  }
  return nullptr;
}

void momentum_step(const AdamRange& range, const MomentumScalars& scalars) {
  run_tiles(range, choose_momentum_tile(scalars.rule, range), scalars, Writes::kAll);
}

void momentum_param(const AdamRange& range, const MomentumScalars& scalars) {
  run_tiles(range, choose_momentum_tile(scalars.rule, range), scalars, Writes::kParam);
}

// [Note: settled values] A NaN is open, whatever both ends are.
inline bool is_settled(uint16_t least, uint16_t most, uint16_t infinity) {
  return least == most && (least & 0x7fff) <= infinity;
}

// A block of values at one of the ends.
inline void run_momentum_tile(UpdateTile<MomentumScalars> update, const AdamRange& r, int64_t i, int64_t numel,
                              const float* momentum, float* unused, void* param, const MomentumScalars& scalars) {
  const auto* master = static_cast<const float*>(r.master) + i;
  const auto* grad = static_cast<const uint16_t*>(r.grad) + i;
  update(Tile{momentum, nullptr, unused, nullptr, master, nullptr, grad, param, numel, {}, ParamStore::kCached},
         scalars);
}

void momentum_param_between(const AdamRange& r, const MomentumScalars& scalars, float most_grad_scale,
                            OpenValues* open) {
  const UpdateTile<MomentumScalars> update = choose_momentum_tile(scalars.rule, r);
  const uint16_t infinity = r.param_dtype == DType::kBFloat16 ? 0x7f80 : 0x7c00;
  MomentumScalars at_most = scalars;
  at_most.grad_scale = most_grad_scale;
  TileMoment momentum;
  momentum.type = r.momentum_type;
  momentum.from = r.momentum;
  momentum.from_scales = r.momentum_scales;
  momentum.to = nullptr;
  alignas(64) float unused[kStateBlock];
  alignas(64) uint16_t most[kStateBlock];
  const auto* grad = static_cast<const uint16_t*>(r.grad);
  auto* const param = static_cast<uint16_t*>(r.param);
  int64_t count = 0;
  bool is_full = false;
  with_ieee_arithmetic([&] {
    for (int64_t i = 0; i < r.numel; i += kStateBlock) {
      const int64_t numel = r.numel - i < kStateBlock ? r.numel - i : kStateBlock;
      const float* const old = momentum.expand_at(i, numel);
      run_momentum_tile(update, r, i, numel, old, unused, param + i, scalars);
      run_momentum_tile(update, r, i, numel, old, unused, most, at_most);
      for (int64_t k = 0; k < numel; ++k) {
        if (is_settled(param[i + k], most[k], infinity)) continue;
        if (count == open->capacity) {
          is_full = true;
          break;
        }
        open->master[count] = static_cast<const float*>(r.master)[i + k];
        open->momentum[count] = old[k];
        open->variance[count] = 0;
        open->grad[count] = grad[i + k];
        open->index[count] = static_cast<uint16_t>(i + k);
        ++count;
      }
    }
  });
  open->count = is_full ? OpenValues::kAll : count;
}

void momentum_param_open(const AdamRange& r, const MomentumScalars& scalars, const OpenValues& open) {
  if (open.count == OpenValues::kAll) return momentum_param(r, scalars);
  AdamRange side_by_side = r;
  side_by_side.master = open.master;
  side_by_side.grad = open.grad;
  const UpdateTile<MomentumScalars> update = choose_momentum_tile(scalars.rule, r);
  alignas(64) float unused[kStateBlock];
  alignas(64) uint16_t made[kStateBlock];
  auto* const param = static_cast<uint16_t*>(r.param);
  with_ieee_arithmetic([&] {
    for (int64_t i = 0; i < open.count; i += kStateBlock) {
      const int64_t numel = open.count - i < kStateBlock ? open.count - i : kStateBlock;
      run_momentum_tile(update, side_by_side, i, numel, open.momentum + i, unused, made, scalars);
      for (int64_t k = 0; k < numel; ++k) param[open.index[i + k]] = made[k];
    }
  });
}

// ---- Casts and sums --------------------------------------------------------------------------------

PS_LOOP split_master(const float* master, uint16_t* param, uint16_t* lower, float* variance, int64_t numel) {
  for_range(0, numel, [&](auto lane, int64_t i) {
    using V = decltype(lane);
    const auto x = V::quiet(V::load(master + i));
    V::store16(param + i, variance == nullptr ? half_away<V>(x) : V::to_bf16(x));
    V::store16(lower + i, V::lower(x));
    if (variance != nullptr) {
      V::store(variance + i, V::with_sign(V::magnitude(V::load(variance + i)), V::tie(x)));
    }
  });
}

PS_LOOP join_master(const uint16_t* param, const uint16_t* lower, const float* variance, float* master, int64_t numel) {
  for_range(0, numel, [&](auto lane, int64_t i) {
    using V = decltype(lane);
    const auto sign = variance == nullptr ? V::set(0.0f) : V::load(variance + i);
    V::store(master + i, V::join(param + i, lower + i, sign));
  });
}

template <DType kOut>
PS_LOOP cast_from_float_loop(const float* in, void* out, int64_t numel) {
  for_range(0, numel, [&](auto lane, int64_t i) {
    using V = decltype(lane);
    const auto x = V::load(in + i);
    store<V, kOut>(out, i, kOut == DType::kFloat32 ? x : V::quiet(x));
  });
}

template <DType kIn>
PS_LOOP cast_to_float_loop(const void* in, float* out, int64_t numel) {
  for_range(0, numel, [&](auto lane, int64_t i) {
    using V = decltype(lane);
    V::store(out + i, load<V, kIn>(in, i));
  });
}

// sum[i] = round(sum[i] + x[i]); the sum's type may be wider than x's.
template <DType kSum, DType kIn>
PS_LOOP add_loop(void* sum, const void* x, int64_t numel) {
  for_range(0, numel, [&](auto lane, int64_t i) {
    using V = decltype(lane);
    store<V, kSum>(sum, i, V::quiet(V::add(load<V, kSum>(sum, i), load<V, kIn>(x, i))));
  });
}

void cast_from_float(const float* in, void* out, DType out_dtype, int64_t numel) {
  with_dtype(out_dtype, [&](auto type) { cast_from_float_loop<type.value>(in, out, numel); });
}

void cast_to_float(const void* in, DType in_dtype, float* out, int64_t numel) {
  with_ieee_arithmetic(
      [&] { with_dtype(in_dtype, [&](auto type) { cast_to_float_loop<type.value>(in, out, numel); }); });
}

void add(void* sum, const void* x, DType dtype, int64_t numel) {
  with_ieee_arithmetic([&] { with_dtype(dtype, [&](auto type) { add_loop<type.value, type.value>(sum, x, numel); }); });
}

void add_to_float(float* sum, const void* x, DType x_dtype, int64_t numel) {
  with_ieee_arithmetic(
      [&] { with_dtype(x_dtype, [&](auto type) { add_loop<DType::kFloat32, type.value>(sum, x, numel); }); });
}

// ---- Sum of squares --------------------------------------------------------------------------------

// The lanes' sums over whole rows of kSquaresLanes elements, as many lanes at a time as registers hold.
template <DType kType>
PS_STEP sum_rows(const void* x, int64_t begin, int64_t rows, double* lanes) {
  constexpr int64_t kGroup = Vector::kSquareVectors * Vector::kWidth;
  static_assert(kSquaresLanes % kGroup == 0);
  for (int64_t first = 0; first < kSquaresLanes; first += kGroup) {
    typename Vector::Squares sums[Vector::kSquareVectors];
    for (auto& sum : sums) sum = Vector::zero_squares();
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t i = begin + row * kSquaresLanes + first;
#pragma GCC unroll 8
      for (int64_t k = 0; k < Vector::kSquareVectors; ++k) {
        sums[k] = Vector::add_squares(sums[k], load<Vector, kType>(x, i + k * Vector::kWidth));
      }
    }
    for (int64_t k = 0; k < Vector::kSquareVectors; ++k) {
      Vector::store_squares(lanes + first + k * Vector::kWidth, sums[k]);
    }
  }
}

template <DType kType>
PS_LOOP sum_squares_loop(const void* x, int64_t numel, double* partials) {
  for (int64_t begin = 0; begin < numel; begin += kSquaresBlock) {
    const int64_t end = begin + kSquaresBlock < numel ? begin + kSquaresBlock : numel;
    const int64_t rows = (end - begin) / kSquaresLanes;
    alignas(64) double lanes[kSquaresLanes];
    sum_rows<kType>(x, begin, rows, lanes);
    const int64_t rest = begin + rows * kSquaresLanes;
    for (int64_t i = rest; i < end; ++i) {
      lanes[i - rest] = ScalarLane::add_squares(lanes[i - rest], load<ScalarLane, kType>(x, i));
    }
    for (int64_t s = kSquaresLanes / 2; s > 0; s /= 2) {
      for (int64_t lane = 0; lane < s; ++lane) lanes[lane] += lanes[lane + s];
    }
    partials[begin / kSquaresBlock] = lanes[0] == lanes[0] ? lanes[0] : __builtin_nan("");
  }
}

void sum_squares(const void* x, DType dtype, int64_t numel, double* partials) {
  with_ieee_arithmetic(
      [&] { with_dtype(dtype, [&](auto type) { sum_squares_loop<type.value>(x, numel, partials); }); });
}

constexpr CpuKernels table(const char* isa) {
  return CpuKernels{isa,
                    adam,
                    adam_param,
                    adam_param_between,
                    adam_param_open,
                    split_master,
                    join_master,
                    cast_from_float,
                    cast_to_float,
                    add,
                    add_to_float,
                    sum_squares,
                    expand_state,
                    compress_state,
                    momentum_step,
                    momentum_param,
                    momentum_param_between,
                    momentum_param_open};
}

#undef PS_FLOATS
#undef PS_FLOAT
#undef PS_INT
#undef PS_LOOP
#undef PS_STEP
#undef PS_INLINE
