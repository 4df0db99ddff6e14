// The optimizer kernels, written once. Each cpu_<isa>.cpp includes this inside its anonymous namespace, after
// scalar_lane.inl and a definition of `Vector`: kWidth floats with the interface of ScalarLane. kernels.h defines the
// results; [Note: ISA files] limits what may be included or emitted.
//
// NaN: the payload that an x86 operation passes on depends on the order of its operands, and CUDA passes on none. Every
// NaN from arithmetic is therefore stored as 0x7fc00000 (binary32) or 0x7ff8000000000000 (binary64). Widening casts and
// binary32 copies do no arithmetic and keep payloads.

#define PS_LOOP __attribute__((noinline)) void
#define PS_STEP inline __attribute__((always_inline)) void
#define PS_INLINE __attribute__((always_inline))
#define PS_FLOATS inline __attribute__((always_inline)) float*
#define PS_FLOAT inline __attribute__((always_inline)) typename V::Float
#define PS_INT inline __attribute__((always_inline)) typename V::Int

template <class V, DType kType>
inline __attribute__((always_inline)) typename V::Float load(const void* base, int64_t i) {
  const auto* p = static_cast<const typename Storage<kType>::Element*>(base) + i;
  if constexpr (kType == DType::kFloat32) {
    return V::load(p);
  } else if constexpr (kType == DType::kBFloat16) {
    return V::load_bf16(p);
  } else {
    return V::load_f16(p);
  }
}

template <class V, DType kType>
PS_STEP store(void* base, int64_t i, typename V::Float x) {
  auto* p = static_cast<typename Storage<kType>::Element*>(base) + i;
  if constexpr (kType == DType::kFloat32) {
    V::store(p, x);
  } else if constexpr (kType == DType::kBFloat16) {
    V::store16(p, V::to_bf16(x));
  } else {
    V::store16(p, V::to_f16(x));
  }
}

template <class V, DType kType>
PS_STEP stream(void* base, int64_t i, typename V::Float x) {
  if constexpr (kType == DType::kFloat32) {
    store<V, kType>(base, i, x);
  } else {
    auto* p = static_cast<uint16_t*>(base) + i;
    V::stream16(p, kType == DType::kBFloat16 ? V::to_bf16(x) : V::to_f16(x));
  }
}

// Calls step(lane, i) for i in [begin, end): whole vectors first, then single elements.
template <class Step>
PS_STEP for_range(int64_t begin, int64_t end, const Step& step) {
  int64_t i = begin;
  for (; i + Vector::kWidth <= end; i += Vector::kWidth) step(Vector(), i);
  for (; i < end; ++i) step(ScalarLane(), i);
}

// In order of their dependencies.
// clang-format off
#include "optim/state_kernels.inl"
#include "optim/adam_kernels.inl"
#include "optim/between_kernels.inl"
#include "optim/tile_kernels.inl"
#include "optim/coded_kernels.inl"
#include "optim/block_kernels.inl"
#include "optim/momentum_kernels.inl"
#include "optim/in_place_kernels.inl"
// clang-format on

// ---- Casts and sums --------------------------------------------------------------------------------

PS_LOOP split_master(const float* master, uint16_t* param, uint16_t* lower, float* variance, int64_t numel) {
  for_range(0, numel, [&](auto lane, int64_t i) {
    using V = decltype(lane);
    const auto x = V::quiet(V::load(master + i));
    V::store16(param + i, variance == nullptr ? half_away<V>(x) : V::to_bf16(x));
    V::store16(lower + i, V::lower(x));
    if (variance != nullptr) {
      V::store(variance + i, V::with_sign(V::magnitude(V::load(variance + i)), V::tie(x)));
    }
  });
}

PS_LOOP join_master(const uint16_t* param, const uint16_t* lower, const float* variance, float* master, int64_t numel) {
  for_range(0, numel, [&](auto lane, int64_t i) {
    using V = decltype(lane);
    const auto sign = variance == nullptr ? V::set(0.0f) : V::load(variance + i);
    V::store(master + i, V::join(param + i, lower + i, sign));
  });
}

template <DType kOut>
PS_LOOP cast_from_float_loop(const float* in, void* out, int64_t numel) {
  for_range(0, numel, [&](auto lane, int64_t i) {
    using V = decltype(lane);
    const auto x = V::load(in + i);
    store<V, kOut>(out, i, kOut == DType::kFloat32 ? x : V::quiet(x));
  });
}

template <DType kIn>
PS_LOOP cast_to_float_loop(const void* in, float* out, int64_t numel) {
  for_range(0, numel, [&](auto lane, int64_t i) {
    using V = decltype(lane);
    V::store(out + i, load<V, kIn>(in, i));
  });
}

// sum[i] = round(sum[i] + x[i]); the sum's type may be wider than x's.
template <DType kSum, DType kIn>
PS_LOOP add_loop(void* sum, const void* x, int64_t numel) {
  for_range(0, numel, [&](auto lane, int64_t i) {
    using V = decltype(lane);
    store<V, kSum>(sum, i, V::quiet(V::add(load<V, kSum>(sum, i), load<V, kIn>(x, i))));
  });
}

void cast_from_float(const float* in, void* out, DType out_dtype, int64_t numel) {
  with_dtype(out_dtype, [&](auto type) { cast_from_float_loop<type.value>(in, out, numel); });
}

void cast_to_float(const void* in, DType in_dtype, float* out, int64_t numel) {
  with_ieee_arithmetic(
      [&] { with_dtype(in_dtype, [&](auto type) { cast_to_float_loop<type.value>(in, out, numel); }); });
}

void add(void* sum, const void* x, DType dtype, int64_t numel) {
  with_ieee_arithmetic([&] { with_dtype(dtype, [&](auto type) { add_loop<type.value, type.value>(sum, x, numel); }); });
}

void add_to_float(float* sum, const void* x, DType x_dtype, int64_t numel) {
  with_ieee_arithmetic(
      [&] { with_dtype(x_dtype, [&](auto type) { add_loop<DType::kFloat32, type.value>(sum, x, numel); }); });
}

// ---- Sum of squares --------------------------------------------------------------------------------

// Sums of whole rows of kSquaresLanes elements, as many lanes at a time as registers hold.
template <DType kType>
PS_STEP sum_rows(const void* x, int64_t begin, int64_t rows, double* lanes) {
  constexpr int64_t kGroup = Vector::kSquareVectors * Vector::kWidth;
  static_assert(kSquaresLanes % kGroup == 0);
  for (int64_t first = 0; first < kSquaresLanes; first += kGroup) {
    typename Vector::Squares sums[Vector::kSquareVectors];
    for (auto& sum : sums) sum = Vector::zero_squares();
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t i = begin + row * kSquaresLanes + first;
#pragma GCC unroll 8
      for (int64_t k = 0; k < Vector::kSquareVectors; ++k) {
        sums[k] = Vector::add_squares(sums[k], load<Vector, kType>(x, i + k * Vector::kWidth));
      }
    }
    for (int64_t k = 0; k < Vector::kSquareVectors; ++k) {
      Vector::store_squares(lanes + first + k * Vector::kWidth, sums[k]);
    }
  }
}

template <DType kType>
PS_LOOP sum_squares_loop(const void* x, int64_t numel, double* partials) {
  for (int64_t begin = 0; begin < numel; begin += kSquaresBlock) {
    const int64_t end = begin + kSquaresBlock < numel ? begin + kSquaresBlock : numel;
    const int64_t rows = (end - begin) / kSquaresLanes;
    alignas(64) double lanes[kSquaresLanes];
    sum_rows<kType>(x, begin, rows, lanes);
    const int64_t rest = begin + rows * kSquaresLanes;
    for (int64_t i = rest; i < end; ++i) {
      lanes[i - rest] = ScalarLane::add_squares(lanes[i - rest], load<ScalarLane, kType>(x, i));
    }
    for (int64_t s = kSquaresLanes / 2; s > 0; s /= 2) {
      for (int64_t lane = 0; lane < s; ++lane) lanes[lane] += lanes[lane + s];
    }
    partials[begin / kSquaresBlock] = lanes[0] == lanes[0] ? lanes[0] : __builtin_nan("");
  }
}

void sum_squares(const void* x, DType dtype, int64_t numel, double* partials) {
  with_ieee_arithmetic(
      [&] { with_dtype(dtype, [&](auto type) { sum_squares_loop<type.value>(x, numel, partials); }); });
}

constexpr CpuKernels table(const char* isa) {
  return CpuKernels{isa,
                    {adam, adam_param, adam_param_between, adam_param_scale_dependent},
                    {momentum_step, momentum_param, momentum_param_between, momentum_param_scale_dependent},
                    adam_put_values,
                    adam_put_scale_dependent_values,
                    adam_put_states,
                    adam_take_values_back,
                    split_master,
                    join_master,
                    cast_from_float,
                    cast_to_float,
                    add,
                    add_to_float,
                    sum_squares,
                    expand_state,
                    compress_state};
}

#undef PS_FLOATS
#undef PS_FLOAT
#undef PS_INT
#undef PS_LOOP
#undef PS_STEP
#undef PS_INLINE
