// A part of kernel_body.inl: Adam's parameters for a range of gradient scales, [Note: scale-independent values].

// Parameters at both ends of the gradients' scale ([Note: scale-independent values]). Exact roots and quotients would
// cost as much time as memory access, so the processor's approximations are used and widened by more than their errors
// and later roundings. A value is scale-dependent if the bounds of its denominator are not of ordinary size.
constexpr float kLeastSquare = 0x1p-120f;
constexpr float kLeastDenominator = 0x1p-100f;
constexpr float kMostDenominator = 0x1p100f;

template <class V>
struct ParamBounds {
  typename V::Float low, high;
  unsigned unknown;  // a mask of lanes

  // m0, m1: new momentum at either end. v0: variance at the least scale.
  inline __attribute__((always_inline)) ParamBounds(const AdamConstants<V>& c, typename V::Float m0,
                                                    typename V::Float m1, typename V::Float v0,
                                                    typename V::Float greater_v, typename V::Float master) {
    const auto less = V::set(1 - 2 * V::kNearError);
    const auto more = V::set(1 + 2 * V::kNearError);
    const auto v1 = V::max(greater_v, V::set(kLeastSquare));
    // For v0 < kLeastSquare, v0 times the inverse root of kLeastSquare is above the root of v0.
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
    const auto p = V::mul(master, c.decay);
    low = V::fma(c.minus_step_size, high_q, p);
    high = V::fma(c.minus_step_size, low_q, p);
    unknown = V::unordered(m0, m1) | V::unordered(low, V::sub(p, p)) | V::not_at_most(V::set(0.0f), v0) |
              V::not_at_most(V::set(kLeastDenominator), d0) | V::not_at_most(d1, V::set(kMostDenominator));
  }
};

template <DType kHalf>
struct BetweenScales {
  AdamRange r;
  const float most_grad_scale;
  const ParamStore param_store;
  const ScaleDependentValues dependent;
  int64_t range_begin = 0;  // first element of `r` in the piece
  int64_t count = 0;
  bool is_full = false;
  StatesUnwritten at_least, at_most;

  BetweenScales(const AdamRange& range, float most, ParamStore store, const ScaleDependentValues& to)
      : r(range), most_grad_scale(most), param_store(store), dependent(to) {}

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
    const ParamBounds<V> bounds(c, V::load(at_least.momentum(r, i)), V::load(at_most.momentum(r, i)),
                                V::load(at_least.variance(r, i)), V::load(at_most.variance(r, i)),
                                V::load(static_cast<const float*>(r.master) + i));
    if (param_store == ParamStore::kCached) store<V, kHalf>(r.param, i, bounds.low);
    if (param_store == ParamStore::kStreaming) stream<V, kHalf>(r.param, i, bounds.low);
    note_scale_dependent(i, bounds.unknown | V::template differ<kHalf>(bounds.low, bounds.high));
  }
  // Records the lanes of the mask while there is room.
  PS_STEP note_scale_dependent(int64_t first, unsigned lanes) {
    for (; lanes != 0 && count < dependent.capacity; lanes &= lanes - 1) {
      const int64_t i = first + __builtin_ctz(lanes);
      dependent.master[count] = static_cast<const float*>(r.master)[i];
      dependent.momentum[count] = momentum_of(r)[i];
      dependent.variance[count] = variance_of(r)[i];
      dependent.grad[count] = static_cast<const uint16_t*>(r.grad)[i];
      dependent.index[count] = static_cast<uint16_t>(range_begin + i);
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
                        ParamStore param_store, ScaleDependentValues* dependent) {
  BetweenScales<kHalf> steps(range, most_grad_scale, param_store, *dependent);
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
  dependent->count = steps.is_full ? ScaleDependentValues::kAll : steps.count;
}

// adam_loop's result for scale-dependent value `k` and the following lanes.
template <class V, DType kHalf>
inline __attribute__((always_inline)) typename V::Float scale_dependent_param(const ScaleDependentValues& dependent,
                                                                              const AdamConstants<V>& c, int64_t k) {
  const auto p = V::load(dependent.master + k);
  const auto g = V::fma(c.weight_decay, p, V::mul(load<V, kHalf>(dependent.grad, k), c.grad_scale));
  const auto m = V::load(dependent.momentum + k);
  const auto next_m = V::fma(c.one_minus_beta1, V::sub(g, m), m);
  const auto v = V::fma(V::mul(c.one_minus_beta2, g), g, V::mul(c.beta2, V::load(dependent.variance + k)));
  const auto d = V::fma(V::sqrt(v), c.inv_sqrt_bias_correction2, c.eps);
  return V::quiet(V::fma(c.minus_step_size, V::div(next_m, d), V::mul(p, c.decay)));
}

// Prefetch distance, in values, of the parameters' lines.
constexpr int64_t kPrefetchDistance = 128;

template <DType kHalf>
PS_LOOP scale_dependent_loop(const AdamRange& range, const AdamScalars& scalars, const ScaleDependentValues& values) {
  const ScaleDependentValues dependent = values;
  auto* const param = static_cast<uint16_t*>(range.param);
  const int64_t last = dependent.count - 1;
  for_range(0, dependent.count, [&](auto lane, int64_t k) {
    using V = decltype(lane);
    uint16_t made[V::kWidth];
    store<V, kHalf>(made, 0, scale_dependent_param<V, kHalf>(dependent, AdamConstants<V>(scalars), k));
    for (int64_t j = k; j < k + V::kWidth; ++j) {
      __builtin_prefetch(param + dependent.index[j + kPrefetchDistance < last ? j + kPrefetchDistance : last], 1);
      param[dependent.index[j]] = made[j - k];
    }
  });
}

inline ParamStore choose_param_store(const AdamRange& r) {
  if (r.param == nullptr) return ParamStore::kNone;
  const bool aligned = reinterpret_cast<uintptr_t>(r.param) % 64 == 0;
  return r.param != r.grad && aligned && r.numel >= kMinStreaming ? ParamStore::kStreaming : ParamStore::kCached;
}
