// A part of kernel_body.inl: optimizers without a variance (`MomentumRule`).

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

// 0 for zeros. NaN for non-finite values, as their product with 0.
template <class V>
PS_FLOAT sign_of(typename V::Float x) {
  const auto sign = V::and_int(V::bits(x), V::set_int(0x80000000u));
  const auto one = V::floats(V::xor_int(V::bits(V::set(1.0f)), sign));
  return V::where_nonzero(V::bits(V::magnitude(x)), V::add(one, V::mul(x, V::set(0.0f))));
}

template <class V, MomentumRule kRule, DType kGrad, DType kParam, class Master, class Moments>
PS_STEP momentum_tile_at(const Tile& t, Moments& moments, const MomentumConstants<V>& c, int64_t i) {
  const auto* grad = static_cast<const typename Storage<kGrad>::Element*>(t.grad) + i;
  __builtin_prefetch(grad + kBlockAhead);
  const auto p = Master::template load<V>(t, i, V::set(0.0f));
  const auto g = V::fma(c.weight_decay, p, V::mul(load<V, kGrad>(grad, 0), c.grad_scale));
  const auto old_m = moments.template load_momentum<V>(i);
  auto m = old_m;
  auto update = old_m;
  if constexpr (kRule == MomentumRule::kLion) {
    const auto distance = V::sub(g, old_m);
    m = V::fma(c.one_minus_beta2, distance, old_m);
    update = sign_of<V>(V::fma(c.one_minus_beta1, distance, old_m));
  } else {
    m = V::fma(c.one_minus_dampening, g, V::mul(c.momentum_factor, old_m));
    update = kRule == MomentumRule::kNesterov ? V::fma(c.momentum_factor, m, g) : m;
  }
  moments.template put_momentum<V>(i, m);
  Master::template put<V, kParam>(t, i, V::quiet(V::fma(c.minus_step_size, update, V::mul(p, c.decay))));
}

template <MomentumRule kRule>
struct OneMomentRule {
  using Scalars = MomentumScalars;
  template <class V>
  using Constants = MomentumConstants<V>;
  static constexpr bool kHasVariance = false;

  template <class V, DType kGrad, DType kParam, class Master, class Moments>
  static PS_STEP update(const Tile& t, Moments& moments, const Constants<V>& c, int64_t i) {
    momentum_tile_at<V, kRule, kGrad, kParam, Master>(t, moments, c, i);
  }
};

template <MomentumRule kRule>
inline UpdateTile<MomentumScalars> choose_momentum_tile(const AdamRange& range) {
  UpdateTile<MomentumScalars> update = nullptr;
  with_dtype(range.grad_dtype, [&](auto grad) {
    constexpr DType kHalf = DType::kBFloat16;
    if (range.master_type == StateType::kNone) {
      update = update_tile<OneMomentRule<kRule>, grad.value, kHalf, BareTile>;
    } else if (range.master_type == StateType::kLowerHalf) {
      update = update_tile<OneMomentRule<kRule>, grad.value, kHalf, UnsignedTile>;
    } else {
      with_dtype(range.param_dtype,
                 [&](auto param) { update = update_tile<OneMomentRule<kRule>, grad.value, param.value, WholeTile>; });
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

inline UpdateCoded<MomentumScalars> choose_momentum_coded(MomentumRule rule, const AdamRange& range) {
  switch (rule) {
    case MomentumRule::kLion:
      return choose_update_coded<OneMomentRule<MomentumRule::kLion>>(range);
    case MomentumRule::kSgd:
      return choose_update_coded<OneMomentRule<MomentumRule::kSgd>>(range);
    case MomentumRule::kNesterov:
      return choose_update_coded<OneMomentRule<MomentumRule::kNesterov>>(range);
  }
  return nullptr;
}

void momentum_step(const AdamRange& range, const MomentumScalars& scalars) {
  run_tiles(range, choose_momentum_tile(scalars.rule, range), choose_momentum_coded(scalars.rule, range), scalars,
            Writes::kAll);
}

void momentum_param(const AdamRange& range, const MomentumScalars& scalars) {
  run_tiles(range, choose_momentum_tile(scalars.rule, range), choose_momentum_coded(scalars.rule, range), scalars,
            Writes::kParam);
}

// True if the value is scale-independent. A NaN never is.
inline bool is_scale_independent(uint16_t least, uint16_t most, uint16_t infinity) {
  return least == most && (least & 0x7fff) <= infinity;
}

// A block of values at one end of the scale.
inline void run_momentum_tile(UpdateTile<MomentumScalars> update, const AdamRange& r, int64_t i, int64_t numel,
                              const float* momentum, float* unused, void* param, const MomentumScalars& scalars) {
  const auto* master = static_cast<const float*>(r.master) + i;
  const auto* grad = static_cast<const uint16_t*>(r.grad) + i;
  update(Tile{master, nullptr, grad, param, numel, nullptr, ParamStore::kCached},
         FloatMoments{momentum, nullptr, unused, nullptr}, scalars);
}

void momentum_param_between(const AdamRange& r, const MomentumScalars& scalars, float most_grad_scale,
                            ScaleDependentValues* dependent) {
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
        if (is_scale_independent(param[i + k], most[k], infinity)) continue;
        if (count == dependent->capacity) {
          is_full = true;
          break;
        }
        dependent->master[count] = static_cast<const float*>(r.master)[i + k];
        dependent->momentum[count] = old[k];
        dependent->variance[count] = 0;
        dependent->grad[count] = grad[i + k];
        dependent->index[count] = static_cast<uint16_t>(i + k);
        ++count;
      }
    }
  });
  dependent->count = is_full ? ScaleDependentValues::kAll : count;
}

void momentum_param_scale_dependent(const AdamRange& r, const MomentumScalars& scalars,
                                    const ScaleDependentValues& dependent) {
  if (dependent.count == ScaleDependentValues::kAll) return momentum_param(r, scalars);
  AdamRange side_by_side = r;
  side_by_side.master = dependent.master;
  side_by_side.grad = dependent.grad;
  const UpdateTile<MomentumScalars> update = choose_momentum_tile(scalars.rule, r);
  alignas(64) float unused[kStateBlock];
  alignas(64) uint16_t made[kStateBlock];
  auto* const param = static_cast<uint16_t*>(r.param);
  with_ieee_arithmetic([&] {
    for (int64_t i = 0; i < dependent.count; i += kStateBlock) {
      const int64_t numel = dependent.count - i < kStateBlock ? dependent.count - i : kStateBlock;
      run_momentum_tile(update, side_by_side, i, numel, dependent.momentum + i, unused, made, scalars);
      for (int64_t k = 0; k < numel; ++k) param[dependent.index[i + k]] = made[k];
    }
  });
}
