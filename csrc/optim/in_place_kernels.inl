// A part of kernel_body.inl: [Note: values in place]. Work proceeds in tiles of kStateBlock elements, counted from the
// piece's first. All passes process an element in the same lane, so that approximations give the same bits.

template <class V>
struct InPlaceConstants : AdamConstants<V> {
  typename V::Float step_size, inverse_decay;

  explicit InPlaceConstants(const AdamScalars& s)
      : AdamConstants<V>(s), step_size(V::set(s.step_size)), inverse_decay(V::set(1.0f / s.decay)) {}
};

// Distance of a split master from its parameter, in units of its last place.
template <class V, class Master>
PS_INT master_distance(const uint16_t* lower, typename V::Float stored_variance) {
  return V::distance(lower, Master::kHasSign ? stored_variance : V::set(0.0f));
}

// Bits of x rounded to its 16-bit parameter, as float32.
template <class V, class Master>
PS_INT rounded_upper(typename V::Float x) {
  const auto bits = V::bits(x);
  const auto odd = V::and_int(V::template shift_right<16>(bits), V::set_int(1));
  const auto bias = Master::kHasSign ? V::add_int(V::set_int(0x7fff), odd) : V::set_int(0x8000);
  return V::and_int(V::add_int(bits, bias), V::set_int(0xffff0000u));
}

// The old master that led to `now`, among those at this distance from their parameters. Moments at the least scale are
// computed as in ParamBounds, so the compiler shares them.
template <class V>
PS_FLOAT found_master(const InPlaceConstants<V>& c, typename V::Float now, typename V::Int distance,
                      typename V::Float grad, typename V::Float m, typename V::Float v) {
  const auto g = V::mul(grad, c.grad_scale);
  const auto next_m = V::fma(c.one_minus_beta1, V::sub(g, m), m);
  const auto next_v = V::fma(V::mul(c.one_minus_beta2, g), g, V::mul(c.beta2, v));
  const auto root = V::mul(next_v, V::near_inverse_sqrt(V::max(next_v, V::set(kLeastSquare))));
  const auto d = V::fma(root, V::mul(c.inv_sqrt_bias_correction2, V::set(1 - 2 * V::kNearError)), c.eps);
  const auto before = V::mul(V::fma(c.step_size, V::mul(next_m, V::near_inverse(d)), now), c.inverse_decay);
  const auto from_distance = V::add_int(V::sub_int(V::bits(before), distance), V::set_int(0x8000));
  return V::floats(V::add_int(V::and_int(from_distance, V::set_int(0xffff0000u)), distance));
}

// A tile of a piece. Moments are float32; the variance has its stored sign.
struct InPlaceTile {
  uint16_t* param;
  const uint16_t* lower;
  const uint16_t* grad;
  const float* momentum;
  const float* variance;
  int64_t begin;  // first element in the piece
  int64_t numel;
};

// New parameters for one scale of the gradients, with adam's bits.
template <class Master>
struct OneScale {
  explicit OneScale(float /*most_grad_scale*/) {}

  template <class V>
  PS_FLOAT value(const AdamConstants<V>& c, typename V::Float p, typename V::Float grad, typename V::Float m,
                 typename V::Float v, unsigned* dependent) const {
    const auto g = V::fma(c.weight_decay, p, V::mul(grad, c.grad_scale));
    const auto next_m = V::fma(c.one_minus_beta1, V::sub(g, m), m);
    const auto next_v = V::fma(V::mul(c.one_minus_beta2, g), g, V::mul(c.beta2, v));
    const auto d = V::fma(V::sqrt(next_v), c.inv_sqrt_bias_correction2, c.eps);
    *dependent = 0;
    return V::quiet(V::fma(c.minus_step_size, V::div(next_m, d), V::mul(p, c.decay)));
  }
};

// New parameters that are equal for all scales from that of the constants to `most_grad_scale`.
template <class Master>
struct ScalesBetween {
  float most_grad_scale;

  template <class V>
  PS_FLOAT value(const AdamConstants<V>& c, typename V::Float p, typename V::Float grad, typename V::Float m,
                 typename V::Float v, unsigned* dependent) const {
    const auto old_v = V::mul(c.beta2, v);
    const auto momentum_at = [&](typename V::Float scale)
                                 PS_INLINE { return V::fma(c.one_minus_beta1, V::sub(V::mul(grad, scale), m), m); };
    const auto variance_at = [&](typename V::Float scale) PS_INLINE {
      const auto g = V::mul(grad, scale);
      return V::fma(V::mul(c.one_minus_beta2, g), g, old_v);
    };
    const auto most = V::set(most_grad_scale);
    const ParamBounds<V> bounds(c, momentum_at(c.grad_scale), momentum_at(most), variance_at(c.grad_scale),
                                variance_at(most), p);
    *dependent =
        bounds.unknown | V::different(rounded_upper<V, Master>(bounds.low), rounded_upper<V, Master>(bounds.high));
    return bounds.low;
  }
};

// Replaces the parameters whose old masters can be found again, and lists the others in `dependent`. Returns false if
// `dependent` is full; the vector's elements are then unchanged.
template <class V, class Master, class Scales>
inline __attribute__((always_inline)) bool put_values_at(const InPlaceTile& t, const InPlaceConstants<V>& c,
                                                         const Scales& scales, int64_t i,
                                                         ScaleDependentValues& dependent) {
  const auto stored_v = V::load(t.variance + i);
  const auto v = Master::template variance<V>(stored_v);
  const auto distance = master_distance<V, Master>(t.lower + i, stored_v);
  const auto p = V::floats(V::add_int(V::bits(V::load_bf16(t.param + i)), distance));
  const auto grad = V::load_bf16(t.grad + i);
  const auto m = V::load(t.momentum + i);
  __builtin_prefetch(t.param + i + kBlockAhead);
  __builtin_prefetch(t.lower + i + kBlockAhead);
  __builtin_prefetch(t.grad + i + kBlockAhead);
  __builtin_prefetch(t.momentum + i + kBlockAhead);
  __builtin_prefetch(t.variance + i + kBlockAhead);
  unsigned lanes;
  const auto now = rounded_upper<V, Master>(scales.template value<V>(c, p, grad, m, v, &lanes));
  lanes |= V::different(V::bits(found_master<V>(c, V::floats(now), distance, grad, m, v)), V::bits(p));
  if (lanes == 0) {
    V::store16(t.param + i, V::upper(now));
    return true;
  }
  alignas(64) uint16_t old[V::kWidth];
  alignas(64) float masters[V::kWidth], momenta[V::kWidth], variances[V::kWidth];
  for (int64_t k = 0; k < V::kWidth; ++k) old[k] = t.param[i + k];
  V::store(masters, p);
  V::store(momenta, m);
  V::store(variances, v);
  V::store16(t.param + i, V::upper(now));
  for (; lanes != 0; lanes &= lanes - 1) {
    const int64_t k = __builtin_ctz(lanes);
    if (dependent.count == dependent.capacity) {
      for (int64_t j = 0; j < V::kWidth; ++j) t.param[i + j] = old[j];
      while (dependent.count > 0 && dependent.index[dependent.count - 1] >= t.begin + i) --dependent.count;
      return false;
    }
    t.param[i + k] = old[k];
    dependent.master[dependent.count] = masters[k];
    dependent.momentum[dependent.count] = momenta[k];
    dependent.variance[dependent.count] = variances[k];
    dependent.grad[dependent.count] = t.grad[i + k];
    dependent.index[dependent.count] = static_cast<uint16_t>(t.begin + i + k);
    ++dependent.count;
  }
  return true;
}

template <class Master, class Scales>
__attribute__((noinline)) int64_t put_values_tile(const InPlaceTile& tile, const AdamScalars& scalars,
                                                  float most_grad_scale, ScaleDependentValues& to) {
  const InPlaceTile t = tile;
  const Scales scales{most_grad_scale};
  ScaleDependentValues dependent = to;
  int64_t i = 0;
  bool has_room = true;
  const InPlaceConstants<Vector> c(scalars);
  for (; has_room && i + Vector::kWidth <= t.numel; i += Vector::kWidth) {
    has_room = put_values_at<Vector, Master>(t, c, scales, i, dependent);
  }
  if (!has_room) i -= Vector::kWidth;
  if (has_room && i < t.numel) {
    const InPlaceConstants<ScalarLane> single(scalars);
    for (; has_room && i < t.numel; ++i) has_room = put_values_at<ScalarLane, Master>(t, single, scales, i, dependent);
    if (!has_room) --i;
  }
  to.count = dependent.count;
  return i;
}

// Iterates over the scale-dependent values of a piece, tile by tile.
struct ScaleDependentCursor {
  const ScaleDependentValues& dependent;
  int64_t next = 0;

  // Old masters from element `first` of the piece on: those found, or the scale-dependent values' recorded ones.
  template <class V>
  PS_FLOAT with_scale_dependent(int64_t first, typename V::Float found) {
    if (next == dependent.count || dependent.index[next] >= first + V::kWidth) return found;
    alignas(64) float masters[V::kWidth];
    V::store(masters, found);
    for (; next < dependent.count && dependent.index[next] < first + V::kWidth; ++next) {
      masters[dependent.index[next] - first] = dependent.master[next];
    }
    return V::load(masters);
  }
};

// Calls use(lane, element of the tile, old master, stored variance) where new parameters are in place. `c` and `single`
// have the scale of put_values.
template <class Master, class Use>
PS_STEP for_old_masters(const InPlaceTile& t, const InPlaceConstants<Vector>& c,
                        const InPlaceConstants<ScalarLane>& single, ScaleDependentCursor& cursor, const Use& use) {
  const auto find = [&](auto lane, int64_t i, const auto& constants) PS_INLINE {
    using V = decltype(lane);
    __builtin_prefetch(t.param + i + kBlockAhead);
    __builtin_prefetch(t.lower + i + kBlockAhead);
    __builtin_prefetch(t.momentum + i + kBlockAhead);
    __builtin_prefetch(t.variance + i + kBlockAhead);
    const auto stored_v = V::load(t.variance + i);
    const auto found =
        found_master<V>(constants, V::load_bf16(t.param + i), master_distance<V, Master>(t.lower + i, stored_v),
                        V::load_bf16(t.grad + i), V::load(t.momentum + i), Master::template variance<V>(stored_v));
    use(lane, i, cursor.with_scale_dependent<V>(t.begin + i, found), stored_v);
  };
  int64_t i = 0;
  for (; i + Vector::kWidth <= t.numel; i += Vector::kWidth) find(Vector(), i, c);
  for (; i < t.numel; ++i) find(ScalarLane(), i, single);
}

// The tiles of a piece, with expanded moments.
struct InPlaceTiles {
  const AdamRange& range;
  TileMoment momentum, variance;

  explicit InPlaceTiles(const AdamRange& r) : range(r) {
    momentum.type = r.momentum_type;
    momentum.from = r.momentum;
    momentum.from_scales = r.momentum_scales;
    momentum.to = r.momentum;
    momentum.to_scales = r.momentum_scales;
    variance.type = r.variance_type;
    variance.from = r.variance;
    variance.from_scales = r.variance_scales;
    variance.to = r.variance;
    variance.to_scales = r.variance_scales;
  }
  InPlaceTile at(int64_t begin, int64_t end) {
    const int64_t numel = end - begin < kStateBlock ? end - begin : kStateBlock;
    return {static_cast<uint16_t*>(range.param) + begin,
            static_cast<const uint16_t*>(range.master) + begin,
            static_cast<const uint16_t*>(range.grad) + begin,
            momentum.expand_at(begin, numel),
            variance.expand_at(begin, numel),
            begin,
            numel};
  }
};

template <class Master>
PS_LOOP take_back(const AdamRange& range, int64_t end, const AdamScalars& scalars,
                  const ScaleDependentValues& dependent) {
  InPlaceTiles tiles(range);
  ScaleDependentCursor cursor{dependent};
  const InPlaceConstants<Vector> c(scalars);
  const InPlaceConstants<ScalarLane> single(scalars);
  for (int64_t begin = 0; begin < end; begin += kStateBlock) {
    const InPlaceTile t = tiles.at(begin, end);
    for_old_masters<Master>(t, c, single, cursor, [&](auto lane, int64_t i, auto master, auto) PS_INLINE {
      using V = decltype(lane);
      V::store16(t.param + i, V::upper(rounded_upper<V, Master>(master)));
    });
  }
}

template <class Master, class Scales>
inline void put_values(const AdamRange& range, const AdamScalars& scalars, float most_grad_scale,
                       ScaleDependentValues* dependent) {
  InPlaceTiles tiles(range);
  dependent->count = 0;
  for (int64_t begin = 0; begin < range.numel; begin += kStateBlock) {
    const InPlaceTile tile = tiles.at(begin, range.numel);
    const int64_t done = put_values_tile<Master, Scales>(tile, scalars, most_grad_scale, *dependent);
    if (done == tile.numel) continue;
    take_back<Master>(range, begin + done, scalars, *dependent);
    dependent->count = ScaleDependentValues::kAll;
    return;
  }
}

// Returns the number of new parameters that differ from those in place.
template <class Master>
__attribute__((noinline)) int64_t put_states(const AdamRange& range, const AdamScalars& scalars,
                                             const AdamScalars& found_by, const ScaleDependentValues& dependent) {
  InPlaceTiles tiles(range);
  ScaleDependentCursor cursor{dependent};
  const InPlaceConstants<Vector> found_c(found_by);
  const InPlaceConstants<ScalarLane> found_single(found_by);
  const AdamConstants<Vector> c(scalars);
  const AdamConstants<ScalarLane> single(scalars);
  int64_t wrong = 0;
  for (int64_t begin = 0; begin < range.numel; begin += kStateBlock) {
    alignas(64) uint16_t made[kStateBlock];
    const InPlaceTile t = tiles.at(begin, range.numel);
    const RandomKey key{range.key.a, range.key.b, range.key.first + begin};
    const Tile update{
        nullptr, static_cast<uint16_t*>(range.master) + begin, t.grad, made, t.numel, nullptr, ParamStore::kCached};
    FloatMoments moments{t.momentum, t.variance, tiles.momentum.next_at(begin), tiles.variance.next_at(begin)};
    for_old_masters<Master>(t, found_c, found_single, cursor,
                            [&](auto lane, int64_t i, auto master, auto stored_v) PS_INLINE {
                              using V = decltype(lane);
                              constexpr DType kHalf = DType::kBFloat16;
                              if constexpr (V::kWidth == Vector::kWidth) {
                                update_tile_from<V, kHalf, kHalf, Master>(update, moments, c, i, master, stored_v);
                              } else {
                                update_tile_from<V, kHalf, kHalf, Master>(update, moments, single, i, master, stored_v);
                              }
                            });
    tiles.momentum.compress_at(begin, t.numel, key, Rounded::kMomentum);
    tiles.variance.compress_at(begin, t.numel, key, Rounded::kVariance);
    for (int64_t i = 0; i < t.numel; ++i) wrong += made[i] != t.param[i] ? 1 : 0;
  }
  return wrong;
}

// Calls body(tag of the master's split) by the type of variance.
template <class Body>
inline void with_split(const AdamRange& range, const Body& body) {
  with_ieee_arithmetic([&] {
    if (range.variance_type == StateType::kFloat32) {
      body(SignedTile());
    } else {
      body(UnsignedTile());
    }
  });
}

void adam_put_values(const AdamRange& range, const AdamScalars& scalars, float most_grad_scale,
                     ScaleDependentValues* dependent) {
  dependent->count = ScaleDependentValues::kAll;
  if (scalars.weight_decay != 0) return;
  with_split(range, [&](auto split) {
    using Master = decltype(split);
    if (most_grad_scale == scalars.grad_scale) {
      put_values<Master, OneScale<Master>>(range, scalars, most_grad_scale, dependent);
    } else {
      put_values<Master, ScalesBetween<Master>>(range, scalars, most_grad_scale, dependent);
    }
  });
}

void adam_put_scale_dependent_values(const AdamRange& range, const AdamScalars& scalars,
                                     const ScaleDependentValues& dependent) {
  if (dependent.count == ScaleDependentValues::kAll) return adam(range, scalars);
  with_split(range, [&](auto split) {
    auto* const param = static_cast<uint16_t*>(range.param);
    for_range(0, dependent.count, [&](auto lane, int64_t k) {
      using V = decltype(lane);
      uint16_t made[V::kWidth];
      const auto p = scale_dependent_param<V, DType::kBFloat16>(dependent, AdamConstants<V>(scalars), k);
      V::store16(made, V::upper(rounded_upper<V, decltype(split)>(p)));
      for (int64_t j = 0; j < V::kWidth; ++j) param[dependent.index[k + j]] = made[j];
    });
  });
}

int64_t adam_put_states(const AdamRange& range, const AdamScalars& scalars, float least_grad_scale,
                        const ScaleDependentValues& dependent) {
  if (dependent.count == ScaleDependentValues::kAll) return 0;
  AdamScalars found_by = scalars;
  found_by.grad_scale = least_grad_scale;
  int64_t wrong = 0;
  with_split(range, [&](auto split) { wrong = put_states<decltype(split)>(range, scalars, found_by, dependent); });
  return wrong;
}

void adam_take_values_back(const AdamRange& range, const AdamScalars& scalars, const ScaleDependentValues& dependent) {
  if (dependent.count == ScaleDependentValues::kAll) return;
  with_split(range, [&](auto split) { take_back<decltype(split)>(range, range.numel, scalars, dependent); });
}
