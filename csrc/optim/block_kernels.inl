// A part of kernel_body.inl: Adam with states of fewer bytes, split masters and no master.

// Moments of a block are expanded to the L1 cache (float32 ones stay in place), updated there in one loop, and
// compressed. Compiled code is thus the sum over types of states, gradients, parameters and masters, not their product.
// Only 8-bit moments beside 16-bit gradients and parameters of one type have a fused loop (`CodedMoment`).
struct Tile {
  const void* master;
  void* next_master;  // null: masters are not written
  const void* grad;
  void* param;
  int64_t numel;
  const uint16_t* random;  // random bits of the block, if the parameter is rounded with them ([Note: random bits])
  ParamStore param_store;
};

struct WholeTile {
  static constexpr bool kDraws = false;

  template <class V>
  static PS_FLOAT load(const Tile& t, int64_t i, typename V::Float /*variance*/) {
    const auto* from = static_cast<const float*>(t.master) + i;
    __builtin_prefetch(from + kBlockAhead);
    return V::load(from);
  }
  template <class V>
  static PS_FLOAT variance(typename V::Float stored) {
    return stored;
  }
  template <class V>
  static PS_FLOAT stored_variance(typename V::Float v, typename V::Float /*p*/) {
    return v;
  }
  template <class V, DType kParam>
  static PS_STEP put(const Tile& t, int64_t i, typename V::Float p) {
    if (t.next_master != nullptr) V::store(static_cast<float*>(t.next_master) + i, p);
    if (t.param_store == ParamStore::kCached) store<V, kParam>(t.param, i, p);
    if (t.param_store == ParamStore::kStreaming) stream<V, kParam>(t.param, i, p);
  }
};

// [Note: split masters] with a float32 variance, which lends its sign.
struct SignedTile {
  static constexpr bool kHasSign = true;
  static constexpr bool kDraws = false;

  template <class V>
  static PS_FLOAT load(const Tile& t, int64_t i, typename V::Float variance) {
    const auto* upper = static_cast<const uint16_t*>(t.param) + i;
    const auto* lower = static_cast<const uint16_t*>(t.master) + i;
    __builtin_prefetch(upper + kBlockAhead);
    __builtin_prefetch(lower + kBlockAhead);
    return V::join(upper, lower, variance);
  }
  template <class V>
  static PS_FLOAT variance(typename V::Float stored) {
    return V::magnitude(stored);
  }
  template <class V>
  static PS_FLOAT stored_variance(typename V::Float v, typename V::Float p) {
    return V::with_sign(v, V::tie(p));
  }
  template <class V, DType kParam>
  static PS_STEP put(const Tile& t, int64_t i, typename V::Float p) {
    V::store16(static_cast<uint16_t*>(t.param) + i, V::to_bf16(p));
    V::store16(static_cast<uint16_t*>(t.next_master) + i, V::lower(p));
  }
};

// [Note: split masters] with a variance of fewer bytes.
struct UnsignedTile {
  static constexpr bool kHasSign = false;
  static constexpr bool kDraws = false;

  template <class V>
  static PS_FLOAT load(const Tile& t, int64_t i, typename V::Float /*variance*/) {
    const auto* upper = static_cast<const uint16_t*>(t.param) + i;
    const auto* lower = static_cast<const uint16_t*>(t.master) + i;
    __builtin_prefetch(upper + kBlockAhead);
    __builtin_prefetch(lower + kBlockAhead);
    return V::join(upper, lower, V::set(0.0f));
  }
  template <class V>
  static PS_FLOAT variance(typename V::Float stored) {
    return stored;
  }
  template <class V>
  static PS_FLOAT stored_variance(typename V::Float v, typename V::Float /*p*/) {
    return v;
  }
  template <class V, DType kParam>
  static PS_STEP put(const Tile& t, int64_t i, typename V::Float p) {
    V::store16(static_cast<uint16_t*>(t.param) + i, half_away<V>(p));
    V::store16(static_cast<uint16_t*>(t.next_master) + i, V::lower(p));
  }
};

// A bfloat16 parameter without master.
struct BareTile {
  static constexpr bool kDraws = true;  // uses random bits

  template <class V>
  static PS_FLOAT load(const Tile& t, int64_t i, typename V::Float /*variance*/) {
    const auto* from = static_cast<const uint16_t*>(t.param) + i;
    __builtin_prefetch(from + kBlockAhead);
    return V::load_bf16(from);
  }
  template <class V>
  static PS_FLOAT variance(typename V::Float stored) {
    return stored;
  }
  template <class V>
  static PS_FLOAT stored_variance(typename V::Float v, typename V::Float /*p*/) {
    return v;
  }
  template <class V, DType kParam>
  static PS_STEP put(const Tile& t, int64_t i, typename V::Float p) {
    V::store16(static_cast<uint16_t*>(t.param) + i, V::upper(rounded_up_by<V>(p, t.random + i % kStateBlock)));
  }
};

// Float32 moments of a tile.
struct FloatMoments {
  const float* momentum;
  const float* variance;
  float* next_momentum;
  float* next_variance;

  template <class V>
  PS_FLOAT load_momentum(int64_t i) const {
    return V::load(momentum + i);
  }
  template <class V>
  PS_FLOAT load_variance(int64_t i) const {
    return V::load(variance + i);
  }
  template <class V>
  PS_STEP put_momentum(int64_t i, typename V::Float x) const {
    V::store(next_momentum + i, V::quiet(x));
  }
  template <class V>
  PS_STEP put_variance(int64_t i, typename V::Float x) const {
    V::store(next_variance + i, V::quiet(x));
  }
};

// Updates from the master and the stored variance.
template <class V, DType kGrad, DType kParam, class Master, class Moments>
PS_STEP update_tile_from(const Tile& t, Moments& moments, const AdamConstants<V>& c, int64_t i, typename V::Float p,
                         typename V::Float stored_v) {
  const auto* grad = static_cast<const typename Storage<kGrad>::Element*>(t.grad) + i;
  __builtin_prefetch(grad + kBlockAhead);
  const auto g = V::fma(c.weight_decay, p, V::mul(load<V, kGrad>(grad, 0), c.grad_scale));
  const auto old_m = moments.template load_momentum<V>(i);
  const auto m = V::fma(c.one_minus_beta1, V::sub(g, old_m), old_m);
  const auto old_v = V::mul(c.beta2, Master::template variance<V>(stored_v));
  const auto v = V::fma(V::mul(c.one_minus_beta2, g), g, old_v);
  const auto d = V::fma(V::sqrt(v), c.inv_sqrt_bias_correction2, c.eps);
  p = V::quiet(V::fma(c.minus_step_size, V::div(m, d), V::mul(p, c.decay)));
  moments.template put_momentum<V>(i, m);
  moments.template put_variance<V>(i, Master::template stored_variance<V>(v, p));
  Master::template put<V, kParam>(t, i, p);
}

template <class V, DType kGrad, DType kParam, class Master, class Moments>
PS_STEP update_tile_at(const Tile& t, Moments& moments, const AdamConstants<V>& c, int64_t i) {
  const auto stored_v = moments.template load_variance<V>(i);
  const auto p = Master::template load<V>(t, i, stored_v);
  update_tile_from<V, kGrad, kParam, Master>(t, moments, c, i, p, stored_v);
}

// The operations of one optimizer, by its scalars.
struct AdamRule {
  using Scalars = AdamScalars;
  template <class V>
  using Constants = AdamConstants<V>;
  static constexpr bool kHasVariance = true;

  template <class V, DType kGrad, DType kParam, class Master, class Moments>
  static PS_STEP update(const Tile& t, Moments& moments, const Constants<V>& c, int64_t i) {
    update_tile_at<V, kGrad, kParam, Master>(t, moments, c, i);
  }
};

template <class Rule, DType kGrad, DType kParam, class Master>
PS_LOOP update_tile(const Tile& tile, const FloatMoments& float_moments, const typename Rule::Scalars& scalars) {
  const Tile t = tile;
  const FloatMoments moments = float_moments;
  const typename Rule::template Constants<Vector> c(scalars);
  int64_t i = 0;
  for (; i + Vector::kWidth <= t.numel; i += Vector::kWidth) {
    Rule::template update<Vector, kGrad, kParam, Master>(t, moments, c, i);
  }
  if (i == t.numel) return;
  const typename Rule::template Constants<ScalarLane> single(scalars);
  for (; i < t.numel; ++i) {
    Rule::template update<ScalarLane, kGrad, kParam, Master>(t, moments, single, i);
  }
}

template <class Scalars>
using UpdateTile = void (*)(const Tile& tile, const FloatMoments& moments, const Scalars& scalars);

inline UpdateTile<AdamScalars> choose_update_tile(const AdamRange& range) {
  UpdateTile<AdamScalars> update = nullptr;
  with_dtype(range.grad_dtype, [&](auto grad) {
    constexpr DType kHalf = DType::kBFloat16;
    if (range.master_type == StateType::kNone) {
      update = update_tile<AdamRule, grad.value, kHalf, BareTile>;
    } else if (range.master_type != StateType::kLowerHalf) {
      with_dtype(range.param_dtype,
                 [&](auto param) { update = update_tile<AdamRule, grad.value, param.value, WholeTile>; });
    } else if (range.variance_type == StateType::kFloat32) {
      update = update_tile<AdamRule, grad.value, kHalf, SignedTile>;
    } else {
      update = update_tile<AdamRule, grad.value, kHalf, UnsignedTile>;
    }
  });
  return update;
}

// One 8-bit moment over a range of whole blocks. A block's scale is known only after its last element, so new values
// wait in `made`, alternating between two blocks, and are encoded while the next block is updated. Divisions and roots
// of the update then overlap with the many short operations of encoding.
template <template <class> class Values, template <class> class Codes>
struct CodedMoment {
  Values<Vector> values;
  Codes<Vector> codes;
  const uint8_t* from;
  const float* from_scales;
  uint8_t* to;
  float* to_scales;
  float* made;
  Vector::Float scale, inverse;
  Largest<Vector> largest;

  CodedMoment(const void* from, const float* from_scales, void* to, float* to_scales, float* made)
      : from(static_cast<const uint8_t*>(from)),
        from_scales(from_scales),
        to(static_cast<uint8_t*>(to)),
        to_scales(to_scales),
        made(made),
        scale(Vector::set(0.0f)),
        inverse(Vector::set(0.0f)) {}

  PS_STEP begin_block(int64_t begin) {
    prefetch_codes(from + begin);
    scale = Vector::set(from_scales[begin / kStateBlock]);
    largest = Largest<Vector>();
  }
  PS_STEP end_block(int64_t begin) { inverse = largest.find_scale(to_scales + begin / kStateBlock); }
  template <class V>
  PS_FLOAT load(int64_t i) const {
    return V::mul(values.load(from + i), scale);
  }
  template <class V>
  PS_STEP put(int64_t i, typename V::Float x) {
    V::store(made_at(i), x);
    largest.add(x);
  }
  // Encodes kCodes elements of the previous block.
  PS_STEP put_codes_at(int64_t i) { put_codes(codes, made_at(i), inverse, to + i); }

 private:
  PS_FLOATS made_at(int64_t i) const { return made + (i & (2 * kStateBlock - 1)); }
};

// The moments of one optimizer, with or without a variance.
template <bool kHasVariance>
struct CodedMoments {
  CodedMoment<SignedValues, SignedCodes> momentum;
  CodedMoment<UnsignedValues, UnsignedCodes> variance;

  PS_STEP begin_block(int64_t begin) {
    momentum.begin_block(begin);
    if constexpr (kHasVariance) variance.begin_block(begin);
  }
  PS_STEP end_block(int64_t begin) {
    momentum.end_block(begin);
    if constexpr (kHasVariance) variance.end_block(begin);
  }
  PS_STEP put_codes_at(int64_t i) {
    momentum.put_codes_at(i);
    if constexpr (kHasVariance) variance.put_codes_at(i);
  }
  template <class V>
  PS_FLOAT load_momentum(int64_t i) const {
    return momentum.template load<V>(i);
  }
  template <class V>
  PS_FLOAT load_variance(int64_t i) const {
    return variance.template load<V>(i);
  }
  template <class V>
  PS_STEP put_momentum(int64_t i, typename V::Float x) {
    momentum.template put<V>(i, x);
  }
  template <class V>
  PS_STEP put_variance(int64_t i, typename V::Float x) {
    variance.template put<V>(i, x);
  }
};

// Old and new moments of a range of whole blocks.
struct CodedRange {
  const void* momentum;
  const void* variance;
  const float* momentum_scales;
  const float* variance_scales;
  void* next_momentum;
  void* next_variance;
  float* next_momentum_scales;
  float* next_variance_scales;
};

template <class Rule, DType kGrad, DType kParam, class Master>
PS_LOOP update_coded(const Tile& tile, const CodedRange& r, const typename Rule::Scalars& scalars,
                     const RandomKey& key) {
  Tile t = tile;
  const typename Rule::template Constants<Vector> c(scalars);
  RandomBits random(key, Rounded::kParam);
  alignas(64) float momentum[2 * kStateBlock];
  alignas(64) float variance[2 * kStateBlock];
  CodedMoments<Rule::kHasVariance> moments{
      {r.momentum, r.momentum_scales, r.next_momentum, r.next_momentum_scales, momentum},
      {r.variance, r.variance_scales, r.next_variance, r.next_variance_scales, variance}};
  const auto begin_block = [&](int64_t begin) PS_INLINE {
    moments.begin_block(begin);
    if constexpr (Master::kDraws) t.random = random.make(begin);
  };
  const auto update_at = [&](int64_t i) PS_INLINE {
    for (int64_t k = 0; k < kCodes; k += Vector::kWidth) {
      Rule::template update<Vector, kGrad, kParam, Master>(t, moments, c, i + k);
    }
  };
  begin_block(0);
  for (int64_t i = 0; i < kStateBlock; i += kCodes) update_at(i);
  int64_t begin = kStateBlock;
  for (; begin < t.numel; begin += kStateBlock) {
    moments.end_block(begin - kStateBlock);
    begin_block(begin);
    for (int64_t i = begin; i < begin + kStateBlock; i += kCodes) {
      update_at(i);
      moments.put_codes_at(i - kStateBlock);
    }
  }
  moments.end_block(begin - kStateBlock);
  for (int64_t i = begin; i < begin + kStateBlock; i += kCodes) moments.put_codes_at(i - kStateBlock);
}

template <class Scalars>
using UpdateCoded = void (*)(const Tile& tile, const CodedRange& range, const Scalars& scalars, const RandomKey& key);

// Null if no fused loop exists for these types.
template <class Rule>
inline UpdateCoded<typename Rule::Scalars> choose_update_coded(const AdamRange& range) {
  if (range.momentum_type != StateType::kSigned8 || range.grad_dtype != range.param_dtype) return nullptr;
  if (Rule::kHasVariance && range.variance_type != StateType::kUnsigned8) return nullptr;
  constexpr DType kHalf = DType::kBFloat16;
  if (range.grad_dtype == DType::kFloat16 && range.master_type == StateType::kFloat32) {
    return update_coded<Rule, DType::kFloat16, DType::kFloat16, WholeTile>;
  }
  if (range.grad_dtype != kHalf) return nullptr;
  if (range.master_type == StateType::kFloat32) return update_coded<Rule, kHalf, kHalf, WholeTile>;
  if (range.master_type == StateType::kLowerHalf) return update_coded<Rule, kHalf, kHalf, UnsignedTile>;
  return update_coded<Rule, kHalf, kHalf, BareTile>;
}

// One moment, from block to block.
struct TileMoment {
  StateType type;
  const void* from;
  const float* from_scales;
  void* to;  // null: not written
  float* to_scales;
  alignas(64) float expanded[kStateBlock];

  bool is_float() const { return type == StateType::kFloat32; }
  const float* expand_at(int64_t i, int64_t numel) {
    if (is_float()) return static_cast<const float*>(from) + i;
    expand(type, static_cast<const char*>(from) + bytes_to(type, i), from_scales + i / kStateBlock, expanded, numel);
    return expanded;
  }
  float* next_at(int64_t i) { return is_float() && to != nullptr ? static_cast<float*>(to) + i : expanded; }
  void compress_at(int64_t i, int64_t numel, const RandomKey& key, Rounded rounded) {
    if (is_float() || to == nullptr) return;
    compress(expanded, type, state_at(to, type, i), to_scales + i / kStateBlock, numel, key, rounded);
  }
};

enum class Writes { kParam, kAll };

template <class Scalars>
inline void run_tiles(const AdamRange& r, UpdateTile<Scalars> update, UpdateCoded<Scalars> update_whole_blocks,
                      const Scalars& scalars, Writes writes) {
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
  RandomBits random(r.key, Rounded::kParam);
  with_ieee_arithmetic([&] {
    int64_t i = 0;
    if (update_whole_blocks != nullptr && all && r.numel >= kStateBlock) {
      i = r.numel / kStateBlock * kStateBlock;
      const Tile tile{r.master, next_master, r.grad, r.param, i, nullptr, param_store};
      const CodedRange moments{momentum.from, variance.from, momentum.from_scales, variance.from_scales,
                               momentum.to,   variance.to,   momentum.to_scales,   variance.to_scales};
      update_whole_blocks(tile, moments, scalars, r.key);
    }
    for (; i < r.numel; i += kStateBlock) {
      const int64_t numel = r.numel - i < kStateBlock ? r.numel - i : kStateBlock;
      const RandomKey key{r.key.a, r.key.b, r.key.first + i};
      const FloatMoments moments{momentum.expand_at(i, numel), variance.expand_at(i, numel), momentum.next_at(i),
                                 variance.next_at(i)};
      const Tile tile{state_at(r.master, r.master_type, i),
                      state_at(next_master, r.master_type, i),
                      static_cast<const char*>(r.grad) + i * grad_size,
                      r.param == nullptr ? nullptr : static_cast<char*>(r.param) + i * param_size,
                      numel,
                      r.master_type == StateType::kNone ? random.make(i) : nullptr,
                      param_store};
      update(tile, moments, scalars);
      momentum.compress_at(i, numel, key, Rounded::kMomentum);
      variance.compress_at(i, numel, key, Rounded::kVariance);
    }
  });
  Vector::end_stream();
}

inline bool are_moments_whole(const AdamRange& range) {
  return range.momentum_type == StateType::kFloat32 && range.variance_type == StateType::kFloat32;
}

void adam(const AdamRange& range, const AdamScalars& scalars) {
  if (!are_moments_whole(range) || range.master_type == StateType::kNone) {
    return run_tiles(range, choose_update_tile(range), choose_update_coded<AdamRule>(range), scalars, Writes::kAll);
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
  if (!are_moments_whole(range))
    return run_tiles(range, choose_update_tile(range), choose_update_coded<AdamRule>(range), scalars, Writes::kParam);
  run_adam<StatesUnwritten>(range, scalars, choose_param_store(range));
  Vector::end_stream();
}

template <class Body>
inline void with_half(DType dtype, const Body& body) {
  if (dtype == DType::kBFloat16) return body(Tag<DType::kBFloat16>());
  body(Tag<DType::kFloat16>());
}

void adam_param_between(const AdamRange& range, const AdamScalars& scalars, float most_grad_scale,
                        ScaleDependentValues* dependent) {
  dependent->count = ScaleDependentValues::kAll;
  if (scalars.weight_decay != 0) return;
  with_ieee_arithmetic([&] {
    with_half(range.param_dtype, [&](auto half) {
      run_between<half.value>(range, scalars, most_grad_scale, choose_param_store(range), dependent);
    });
  });
  Vector::end_stream();
}

void adam_param_scale_dependent(const AdamRange& range, const AdamScalars& scalars,
                                const ScaleDependentValues& dependent) {
  if (dependent.count == ScaleDependentValues::kAll) return adam_param(range, scalars);
  with_ieee_arithmetic([&] {
    with_half(range.param_dtype, [&](auto half) { scale_dependent_loop<half.value>(range, scalars, dependent); });
  });
}
