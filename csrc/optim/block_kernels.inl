// A part of kernel_body.inl: Adam with states of fewer bytes, split masters and none.

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
