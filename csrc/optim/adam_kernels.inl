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
