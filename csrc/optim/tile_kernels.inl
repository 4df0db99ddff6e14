// A part of kernel_body.inl: the update of a block of elements whose moments are float32, by kind of master.

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
