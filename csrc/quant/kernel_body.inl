// The quantisation kernels, written once. Each cpu_<isa>.cpp includes this inside its anonymous namespace, after
// scalar_lane.inl and a definition of `Vector`: kWidth floats with the interface of ScalarLane. nf4_values(p, i)
// decodes the kWidth codes in the bytes at p, element i first. kernels.h defines the results.

template <class V, DType kType>
inline __attribute__((always_inline)) void store(void* out, int64_t i, typename V::Float x) {
  auto* p = static_cast<typename Storage<kType>::Element*>(out) + i;
  if constexpr (kType == DType::kFloat32) {
    V::store_float(p, x);
  } else if constexpr (kType == DType::kBFloat16) {
    V::store_bf16(p, x);
  } else {
    V::store_f16(p, x);
  }
}

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// Calls step(lane, i) for i in [begin, end): whole vectors first, then single elements.
template <class Step>
inline __attribute__((always_inline)) void for_range(int64_t begin, int64_t end, const Step& step) {
  int64_t i = begin;
  for (; i + Vector::kWidth <= end; i += Vector::kWidth) step(Vector(), i);
  for (; i < end; ++i) step(ScalarLane(), i);
}

// Calls body(b, begin, end) for each block b of elements [0, numel).
template <class Body>
inline __attribute__((always_inline)) void for_blocks(int64_t numel, int64_t block, const Body& body) {
  for (int64_t b = 0; b * block < numel; ++b) body(b, b * block, least(numel, (b + 1) * block));
}

__attribute__((noinline)) void absmax_loop(const float* in, int64_t numel, int64_t block, float* absmax) {
  for_blocks(numel, block, [&](int64_t b, int64_t begin, int64_t end) {
    auto wide = Vector::zero();
    int64_t i = begin;
    for (; i + Vector::kWidth <= end; i += Vector::kWidth) wide = Vector::max_magnitude(wide, Vector::load(in + i));
    uint32_t most = Vector::largest(wide);
    for (; i < end; ++i) most = ScalarLane::max_magnitude(most, in[i]);
    absmax[b] = float_of(most);
  });
}

__attribute__((noinline)) void encode_nf4_loop(const float* in, int64_t numel, const float* absmax, uint8_t* codes) {
  for_blocks(numel, kNf4Block, [&](int64_t b, int64_t begin, int64_t end) {
    const float inverse = 1.0f / (absmax[b] > kLeastAbsmax ? absmax[b] : kLeastAbsmax);
    uint8_t loose[kNf4Block];
    if (end % 2 != 0) loose[end - begin] = 7;  // the code of zero
    for_range(begin, end, [&](auto lane, int64_t i) {
      using V = decltype(lane);
      V::store_codes(loose + (i - begin), V::nf4_code(V::mul(V::load(in + i), V::set(inverse))));
    });
    for (int64_t i = begin; i < end; i += 2) {
      codes[i / 2] = static_cast<uint8_t>(loose[i - begin] << 4 | loose[i - begin + 1]);
    }
  });
}

__attribute__((noinline)) void encode_int8_loop(const float* in, int64_t numel, const float* absmax, uint8_t* codes) {
  for_blocks(numel, kInt8Block, [&](int64_t b, int64_t begin, int64_t end) {
    const float inverse = absmax[b] > 0 ? 127.0f / absmax[b] : 0.0f;
    for_range(begin, end, [&](auto lane, int64_t i) {
      using V = decltype(lane);
      V::store_codes(codes + i, V::round_to_int(V::mul(V::load(in + i), V::set(inverse))));
    });
  });
}

__attribute__((noinline)) void expand_scales_loop(const uint8_t* codes, const float* scales, float offset,
                                                  int64_t first, int64_t count, float* out) {
  for (int64_t i = 0; i < count; ++i) {
    const float scaled = kDynamicMap.values[codes[i]] * scales[(first + i) / kNf4ScaleBlock];
    out[i] = scaled + offset;
  }
}

template <DType kType>
__attribute__((noinline)) void decode_nf4_loop(const uint8_t* codes, const float* scales, int64_t numel, void* out) {
  for_blocks(numel, kNf4Block, [&](int64_t b, int64_t begin, int64_t end) {
    const auto scale = Vector::set(scales[b]);
    int64_t i = begin;
    for (; i + Vector::kWidth <= end; i += Vector::kWidth) {
      store<Vector, kType>(out, i, Vector::mul(Vector::nf4_values(codes + i / 2, i), scale));
    }
    for (; i < end; ++i) {
      const uint32_t code = i % 2 == 0 ? codes[i / 2] >> 4 : codes[i / 2] & 15;
      store<ScalarLane, kType>(out, i, kNf4Map.values[code] * scales[b]);
    }
  });
}

template <DType kType>
__attribute__((noinline)) void decode_int8_loop(const uint8_t* codes, const float* scales, int64_t numel, void* out) {
  for_blocks(numel, kInt8Block, [&](int64_t b, int64_t begin, int64_t end) {
    for_range(begin, end, [&](auto lane, int64_t i) {
      using V = decltype(lane);
      const auto scaled = V::mul(V::from_int8(codes + i), V::set(scales[b]));
      store<V, kType>(out, i, V::mul(scaled, V::set(kInt8Step)));
    });
  });
}

void absmax(const float* in, int64_t numel, int64_t block, float* absmax) {
  with_ieee_arithmetic([&] { absmax_loop(in, numel, block, absmax); });
}
void encode_nf4(const float* in, int64_t numel, const float* absmax, uint8_t* codes) {
  with_ieee_arithmetic([&] { encode_nf4_loop(in, numel, absmax, codes); });
}
void encode_int8(const float* in, int64_t numel, const float* absmax, uint8_t* codes) {
  with_ieee_arithmetic([&] { encode_int8_loop(in, numel, absmax, codes); });
}
void expand_scales(const uint8_t* codes, const float* scales, float offset, int64_t first, int64_t count, float* out) {
  with_ieee_arithmetic([&] { expand_scales_loop(codes, scales, offset, first, count, out); });
}
void decode_nf4(const uint8_t* codes, const float* scales, int64_t numel, DType dtype, void* out) {
  with_ieee_arithmetic(
      [&] { with_dtype(dtype, [&](auto type) { decode_nf4_loop<type.value>(codes, scales, numel, out); }); });
}
void decode_int8(const uint8_t* codes, const float* scales, int64_t numel, DType dtype, void* out) {
  with_ieee_arithmetic(
      [&] { with_dtype(dtype, [&](auto type) { decode_int8_loop<type.value>(codes, scales, numel, out); }); });
}

constexpr CpuKernels table(const char* isa) {
  return {isa, absmax, encode_nf4, encode_int8, expand_scales, decode_nf4, decode_int8};
}
