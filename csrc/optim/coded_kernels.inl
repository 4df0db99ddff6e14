// A part of kernel_body.inl: the fused update of whole blocks with 8-bit moments.

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
