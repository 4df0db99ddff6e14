// A part of kernel_body.inl: Adam with states of fewer bytes, split masters and no master.
//
// Moments of a block are expanded to the L1 cache (float32 ones stay in place), updated there in one loop, and
// compressed. Compiled code is thus the sum over types of states, gradients, parameters and masters, not their product.
// Only 8-bit moments beside 16-bit gradients and parameters of one type have a fused loop (`CodedMoment`).

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
