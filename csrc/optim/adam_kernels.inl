// A part of kernel_body.inl: Adam over float32 states, whole and in passes.
//
// Adam is bound by memory: it reads and writes 14 bytes per element. Its arrays often lie at equal offsets within a
// large power of two, so all streams hit the same few memory channels at once. The three updates therefore run skewed:
// momentum is kSkew elements ahead of variance, and variance kSkew ahead of the parameter. Each re-reads the gradient
// from the L1 cache. The arithmetic per element is unchanged. With prefetching the skew gives the time of well-spaced
// arrays (0.53 instead of 0.84 ns per element on a Zen 4).

enum class ParamStore { kNone, kCached, kStreaming };

// Moments as float32.
PS_FLOATS momentum_of(const AdamRange& r) { return static_cast<float*>(r.momentum); }
PS_FLOATS variance_of(const AdamRange& r) { return static_cast<float*>(r.variance); }

// Elements per iteration of the main loop: whole cache lines of each stream.
constexpr int64_t kStride = 32;
constexpr int64_t kSkew = 128;
constexpr int64_t kPrefetchBytes = 2048;
// Shorter ranges use cached stores, for the parameter's next reader.
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

// Prefetches the lines of kStride elements of kSize bytes, at the same element distance as the floats.
template <int64_t kSize>
PS_STEP prefetch_lines(const void* first) {
  const auto* lines = static_cast<const char*>(first) + kPrefetchBytes * kSize / 4;
  for (int64_t k = 0; k < kStride * kSize; k += 64) __builtin_prefetch(lines + k);
}

// Float32 master and variance in arrays of their own.
struct WholeMaster {
  template <class V>
  static inline __attribute__((always_inline)) typename V::Float load(const AdamRange& r, int64_t i) {
    return V::load(static_cast<const float*>(r.master) + i);
  }
  template <class V>
  static inline __attribute__((always_inline)) typename V::Float variance(typename V::Float stored) {
    return stored;
  }
  // The value to store for a new variance while the master is still old.
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

// [Note: split masters]. The variance keeps the old master's sign until the master is updated.
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

// New states replace the old ones; the parameter's update reads the moments there.
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

// New states go to a ring in the L1 cache and nowhere else: only the parameter is wanted. Vectors start at multiples of
// their width, so none wraps around.
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

// New states go to separate arrays, with non-temporal stores: a cached store would first read its line, which takes
// half as much time again.
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

// The three updates of one element run in this order; the master is still old in the first two.
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

// `i` is the element whose momentum is updated next. All streams are prefetched at the same distance from it, so reads
// are kSkew apart too.
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

// Calls momentum, variance and param as update(lane, i, constants) for all elements of `r`, skewed by kSkew.
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

// Cached stores: parameters were read, so their lines are in the cache.
inline void run_split_adam(const AdamRange& range, const AdamScalars& scalars) {
  with_ieee_arithmetic([&] {
    with_dtype(range.grad_dtype, [&](auto grad) {
      adam_loop<grad.value, DType::kBFloat16, SplitMaster, StatesInPlace>(range, scalars, ParamStore::kCached);
    });
  });
}
