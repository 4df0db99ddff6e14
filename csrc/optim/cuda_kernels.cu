// The leaf kernels on the device. Torch-free. The numerics are those of [Note: one order of operations] and
// [Note: one order of summation] in kernels.h and of the note on NaN in kernel_body.inl; intrinsics with an
// explicit rounding mode keep the compiler from contracting, whatever its flags.
#include <cstdint>

#include "common/cuda_elementwise.h"
#include "optim/cuda_kernels.h"
#include "optim/dynamic_map.h"

namespace patrickstar::optim::cuda {

namespace {

using namespace patrickstar::cuda;

// Elements per thread where a binary32 array takes part: 16 bytes of it.
constexpr int kFloatPack = 4;

// ---- Bodies ------------------------------------------------------------------------------------------

// [Note: one order of operations]
__device__ inline void adam_step(const AdamScalars& s, float g, float& p, float& m, float& v) {
  g = __fmul_rn(g, s.grad_scale);
  g = __fmaf_rn(s.weight_decay, p, g);
  p = __fmul_rn(p, s.decay);
  m = quiet(__fmaf_rn(s.one_minus_beta1, __fsub_rn(g, m), m));
  v = quiet(__fmaf_rn(__fmul_rn(s.one_minus_beta2, g), g, __fmul_rn(s.beta2, v)));
  const float d = __fmaf_rn(__fsqrt_rn(v), s.inv_sqrt_bias_correction2, s.eps);
  p = quiet(__fmaf_rn(-s.step_size, __fdiv_rn(m, d), p));
}

// [Note: optimizers of one moment]
__device__ inline float sign_of(float x) {
  return x == 0.0f ? 0.0f : __fadd_rn(copysignf(1.0f, x), __fmul_rn(x, 0.0f));
}
__device__ inline void momentum_step(const MomentumScalars& s, float g, float& p, float& m) {
  g = __fmul_rn(g, s.grad_scale);
  g = __fmaf_rn(s.weight_decay, p, g);
  float update;
  if (s.rule == MomentumRule::kLion) {
    const float distance = __fsub_rn(g, m);
    update = sign_of(__fmaf_rn(s.one_minus_beta1, distance, m));
    m = quiet(__fmaf_rn(s.one_minus_beta2, distance, m));
  } else {
    m = quiet(__fmaf_rn(s.one_minus_dampening, g, __fmul_rn(s.momentum_factor, m)));
    update = s.rule == MomentumRule::kNesterov ? __fmaf_rn(s.momentum_factor, m, g) : m;
  }
  p = quiet(__fmaf_rn(-s.step_size, update, __fmul_rn(p, s.decay)));
}

// What a block's update consists of, by its scalars.
__device__ inline void step(const AdamScalars& s, float g, float& p, float& m, float& v) { adam_step(s, g, p, m, v); }
__device__ inline void step(const MomentumScalars& s, float g, float& p, float& m, float& /*v*/) {
  momentum_step(s, g, p, m);
}

// A thread loads all of its elements before it stores any, so `param` may be `grad`.
template <DType kGrad, DType kParam, StateType kMaster>
struct AdamBody {
  AdamRange r;
  AdamScalars s;

  template <int kCount>
  __device__ void run(int64_t i) const {
    float g[kCount], p[kCount], m[kCount], v[kCount];
    load<kGrad>(r.grad, i, g);
    load<DType::kFloat32>(r.momentum, i, m);
    load<DType::kFloat32>(r.variance, i, v);
    load_master(i, p, v);
#pragma unroll
    for (int k = 0; k < kCount; ++k) adam_step(s, g[k], p[k], m[k], v[k]);
    const bool apart = r.new_master != nullptr;
    store_master(apart ? r.new_master : r.master, i, p, v);
    store<DType::kFloat32>(apart ? r.new_momentum : r.momentum, i, m);
    store<DType::kFloat32>(apart ? r.new_variance : r.variance, i, v);
    if (r.param != nullptr) store<kParam>(r.param, i, p);
  }

  // [Note: split masters]
  template <int kCount>
  __device__ void load_master(int64_t i, float (&p)[kCount], float (&v)[kCount]) const {
    if constexpr (kMaster == StateType::kFloat32) {
      load<DType::kFloat32>(r.master, i, p);
    } else {
      using Halves = Pack<uint16_t, kCount>;
      const auto upper = *reinterpret_cast<const Halves*>(static_cast<const uint16_t*>(r.param) + i);
      const auto lower = *reinterpret_cast<const Halves*>(static_cast<const uint16_t*>(r.master) + i);
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        const uint32_t distance = static_cast<uint32_t>(static_cast<int32_t>(static_cast<int16_t>(lower.elements[k])));
        const uint32_t carry = __float_as_uint(v[k]) >> 31 << 16;
        p[k] = __uint_as_float((static_cast<uint32_t>(upper.elements[k]) << 16) + distance + carry);
        v[k] = __uint_as_float(__float_as_uint(v[k]) & 0x7fffffffu);
      }
    }
  }
  template <int kCount>
  __device__ void store_master(void* to, int64_t i, const float (&p)[kCount], float (&v)[kCount]) const {
    if constexpr (kMaster == StateType::kFloat32) {
      store<DType::kFloat32>(to, i, p);
    } else {
      Pack<uint16_t, kCount> lower;
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        const uint32_t bits = __float_as_uint(p[k]);
        lower.elements[k] = static_cast<uint16_t>(bits);
        if ((bits & 0x1ffffu) == 0x8000u) v[k] = __uint_as_float(__float_as_uint(v[k]) | 0x80000000u);
      }
      *reinterpret_cast<Pack<uint16_t, kCount>*>(static_cast<uint16_t*>(to) + i) = lower;
    }
  }
};

template <DType kIn, DType kOut>
struct CastBody {
  const void* in;
  void* out;

  template <int kCount>
  __device__ void run(int64_t i) const {
    float x[kCount];
    load<kIn>(in, i, x);
    store<kOut>(out, i, x);
  }
};

template <DType kSum, DType kIn>
struct AddBody {
  void* sum;
  const void* x;

  template <int kCount>
  __device__ void run(int64_t i) const {
    float a[kCount], b[kCount];
    load<kSum>(sum, i, a);
    load<kIn>(x, i, b);
#pragma unroll
    for (int k = 0; k < kCount; ++k) a[k] = quiet(__fadd_rn(a[k], b[k]));
    store<kSum>(sum, i, a);
  }
};

// One block of threads per block of elements, thread l for lane l: [Note: one order of summation].
template <DType kType>
__global__ void __launch_bounds__(kSquaresLanes) squares(const void* x, int64_t numel, double* partials) {
  using Element = typename Storage<kType>::Element;
  const int lane = static_cast<int>(threadIdx.x);
  __shared__ double upper[kSquaresLanes / 2];
  for (int64_t block = blockIdx.x; block * kSquaresBlock < numel; block += gridDim.x) {
    const int64_t begin = block * kSquaresBlock;
    const int64_t end = begin + kSquaresBlock < numel ? begin + kSquaresBlock : numel;
    double sum = 0.0;
#pragma unroll 8
    for (int64_t i = begin + lane; i < end; i += kSquaresLanes) {
      const double wide = to_float<kType>(static_cast<const Element*>(x)[i]);
      sum = __fma_rn(wide, wide, sum);
    }
    if (lane >= kSquaresLanes / 2) upper[lane - kSquaresLanes / 2] = sum;
    __syncthreads();
    if (lane < kSquaresLanes / 2) {
      sum = __dadd_rn(sum, upper[lane]);
      // Lanes from s on add what no one reads.
      for (int s = kSquaresLanes / 4; s > 0; s /= 2) sum = __dadd_rn(sum, __shfl_down_sync(0xffffffffu, sum, s));
      if (lane == 0) partials[block] = sum == sum ? sum : __longlong_as_double(0x7ff8000000000000ll);
    }
    __syncthreads();
  }
}
static_assert(kSquaresLanes == 64, "the fold in squares() takes two warps");

// ---- States of fewer bytes ---------------------------------------------------------------------------

// A warp has a block of states, lane l its elements l, l + 32, and so on: kPerLane of them.
constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kPerLane = static_cast<int>(kStateBlock) / kWarp;

__constant__ DynamicMap device_signed_map = make_signed_map();
__constant__ DynamicMap device_unsigned_map = make_unsigned_map();

// [Note: random bits]
struct RandomBits {
  RandomKey key;

  __device__ uint32_t states(int64_t i) const {
    uint32_t x = static_cast<uint32_t>(key.first + i) ^ key.a;
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = ((x ^ (x >> 15)) + key.b) * 0x846ca68bu;
    return x ^ (x >> 16);
  }
  __device__ uint32_t momentum(int64_t i) const { return states(i) >> 16; }
  __device__ uint32_t variance(int64_t i) const { return states(i) & 0xffffu; }
  __device__ uint32_t param(int64_t i) const {
    uint32_t x = states(i) + 0x9e3779b9u;
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return x >> 16;
  }
};

__device__ inline uint16_t rounded_up_by(float x, uint32_t bits) {
  return static_cast<uint16_t>((__float_as_uint(quiet(x)) + bits) >> 16);
}

// [Note: states of 8 bits] Tables lie in the lanes, eight of which hold one; all lanes of the warp look up at once.
struct Codes {
  bool is_signed;
  float slope, offset, start, steps, first, last;

  __device__ explicit Codes(StateType type) : is_signed(type == StateType::kSigned8) {
    const DynamicMap& map = is_signed ? device_signed_map : device_unsigned_map;
    const int lane = static_cast<int>(threadIdx.x) % kMapSections;
    slope = map.slope_by_exponent[lane];
    offset = map.offset_by_exponent[lane];
    start = map.start[lane];
    steps = map.steps[lane];
    first = map.first[lane];
    last = map.last[lane];
  }
  static __device__ float lookup(float table, uint32_t index) {
    return __shfl_sync(kAllLanes, table, static_cast<int>(index % kMapSections));
  }
  __device__ float value(uint8_t code) const {
    const int number = is_signed ? static_cast<int8_t>(code) : code + 1;
    const float x = __int2float_rn(number);
    const uint32_t exponent = __float_as_uint(x) >> 23;
    const float y = __fmaf_rn(fabsf(x), lookup(slope, exponent), lookup(offset, exponent));
    if (number == 0) return 0.0f;
    return __uint_as_float(__float_as_uint(y) ^ (__float_as_uint(x) & 0x80000000u));
  }
  __device__ uint8_t code(float scaled) const {
    const float x = fabsf(scaled);
    const float guess = __fmaf_rn(__int2float_rn(__float_as_int(x)), kGuessSlope, kGuessOffset);
    int section = __float2int_rn(guess > 0.0f ? guess : 0.0f);
    if (x < lookup(start, static_cast<uint32_t>(section))) --section;
    const auto index = static_cast<uint32_t>(section);
    const float near = __fmaf_rn(x, lookup(steps, index), lookup(first, index));
    const float most = lookup(last, index);
    const int entry = __float2int_rn(near < most ? near : most);
    if (!is_signed) return static_cast<uint8_t>(scaled > 0.0f && entry < 2 ? 1 : entry - 1);
    const bool negative = (__float_as_uint(scaled) & 0x80000000u) != 0;
    return static_cast<uint8_t>(negative ? -(entry < 127 ? entry : 127) : entry);
  }
};

// One block of one state, by all lanes of a warp. Elements from `count` on are outside of the range: they are zeros.
struct StateBlock {
  StateType type;
  int64_t begin;
  int count;

  static __device__ int element(int k) { return k * kWarp + static_cast<int>(threadIdx.x) % kWarp; }
  __device__ bool has(int k) const { return element(k) < count; }

  __device__ void load(const void* data, const float* scales, float (&out)[kPerLane]) const {
    if (is_8_bit(type)) {
      const Codes codes(type);
      const float scale = scales[begin / kStateBlock];
#pragma unroll
      for (int k = 0; k < kPerLane; ++k) {
        const uint8_t code = has(k) ? static_cast<const uint8_t*>(data)[begin + element(k)] : uint8_t{0};
        const float value = quiet(__fmul_rn(codes.value(code), scale));
        out[k] = has(k) ? value : 0.0f;
      }
      return;
    }
#pragma unroll
    for (int k = 0; k < kPerLane; ++k) {
      const int64_t i = begin + element(k);
      out[k] = 0.0f;
      if (!has(k) || type == StateType::kNone) continue;
      out[k] = type == StateType::kFloat32 ? static_cast<const float*>(data)[i]
                                           : to_float<DType::kBFloat16>(static_cast<const uint16_t*>(data)[i]);
    }
  }
  // bits(i): the random ones of element i of the range.
  template <class Bits>
  __device__ void store(const float (&in)[kPerLane], void* data, float* scales, const Bits& bits) const {
    if (is_8_bit(type)) return store_codes(in, static_cast<uint8_t*>(data), scales);
#pragma unroll
    for (int k = 0; k < kPerLane; ++k) {
      const int64_t i = begin + element(k);
      if (!has(k) || type == StateType::kNone) continue;
      if (type == StateType::kFloat32) {
        static_cast<float*>(data)[i] = in[k];
      } else {
        static_cast<uint16_t*>(data)[i] = rounded_up_by(in[k], bits(i));
      }
    }
  }

 private:
  __device__ void store_codes(const float (&in)[kPerLane], uint8_t* data, float* scales) const {
    uint32_t most = 0;
#pragma unroll
    for (int k = 0; k < kPerLane; ++k) {
      const uint32_t magnitude = has(k) ? __float_as_uint(in[k]) & 0x7fffffffu : 0;
      most = magnitude > most ? magnitude : most;
    }
    for (int distance = kWarp / 2; distance > 0; distance /= 2) {
      const uint32_t other = __shfl_xor_sync(kAllLanes, most, distance);
      most = other > most ? other : most;
    }
    bool is_positive = false;
#pragma unroll
    for (int k = 0; k < kPerLane; ++k) is_positive |= has(k) && __float_as_uint(in[k]) == most;
    const uint32_t sign = __any_sync(kAllLanes, is_positive) != 0 ? 0 : 0x80000000u;
    const bool ordinary = most >= kLeastScaleBits && most < 0x7f800000u;
    const float scale = __uint_as_float(ordinary ? most | sign : most < kLeastScaleBits ? 0 : 0x7fc00000u);
    if (threadIdx.x % kWarp == 0) scales[begin / kStateBlock] = scale;
    const float inverse = ordinary ? __fdiv_rn(1.0f, scale) : 0.0f;
    const Codes codes(type);
#pragma unroll
    for (int k = 0; k < kPerLane; ++k) {
      // (Zeros where there is no ordinary scale, so that all lanes look up.)
      const uint8_t code = codes.code(ordinary && has(k) ? __fmul_rn(in[k], inverse) : 0.0f);
      if (has(k)) data[begin + element(k)] = ordinary ? code : uint8_t{0};
    }
  }
};

// Calls run(block) for each block of a range, by a whole warp.
template <class Run>
__device__ void for_blocks(int64_t numel, const Run& run) {
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kWarp;
  const int64_t step = static_cast<int64_t>(gridDim.x) * (kThreads / kWarp);
  for (int64_t begin = first * kStateBlock; begin < numel; begin += step * kStateBlock) {
    const int64_t rest = numel - begin;
    run(begin, static_cast<int>(rest < kStateBlock ? rest : kStateBlock));
  }
}

// Of any types of states; the parameter is bfloat16 where the master is not float32.
template <DType kGrad, DType kParam, class Scalars>
__global__ void __launch_bounds__(kThreads) update_blocks(AdamRange r, Scalars s) {
  const RandomBits random{r.key};
  const bool apart = r.new_master != nullptr;
  const bool tie_in_sign = r.master_type == StateType::kLowerHalf && r.variance_type == StateType::kFloat32;
  for_blocks(r.numel, [&](int64_t begin, int count) {
    const StateBlock momentum{r.momentum_type, begin, count};
    const StateBlock variance{r.variance_type, begin, count};
    float m[kPerLane], v[kPerLane];
    momentum.load(r.momentum, r.momentum_scales, m);
    variance.load(r.variance, r.variance_scales, v);
#pragma unroll
    for (int k = 0; k < kPerLane; ++k) {
      if (!momentum.has(k)) continue;
      const int64_t i = begin + StateBlock::element(k);
      float p;
      if (r.master_type == StateType::kFloat32) {
        p = static_cast<const float*>(r.master)[i];
      } else {
        uint32_t bits = static_cast<uint32_t>(static_cast<const uint16_t*>(r.param)[i]) << 16;
        if (r.master_type == StateType::kLowerHalf) {
          const uint16_t lower = static_cast<const uint16_t*>(r.master)[i];
          bits += static_cast<uint32_t>(static_cast<int32_t>(static_cast<int16_t>(lower)));
        }
        if (tie_in_sign) {
          bits += __float_as_uint(v[k]) >> 31 << 16;
          v[k] = fabsf(v[k]);
        }
        p = __uint_as_float(bits);
      }
      step(s, to_float<kGrad>(static_cast<const typename Storage<kGrad>::Element*>(r.grad)[i]), p, m[k], v[k]);
      const uint32_t bits = __float_as_uint(p);
      if (r.master_type == StateType::kFloat32) {
        (apart ? r.new_master : static_cast<float*>(r.master))[i] = p;
        if (r.param != nullptr) {
          static_cast<typename Storage<kParam>::Element*>(r.param)[i] = from_float<kParam>(p);
        }
      } else if (r.master_type == StateType::kNone) {
        static_cast<uint16_t*>(r.param)[i] = rounded_up_by(p, random.param(i));
      } else {
        static_cast<uint16_t*>(r.master)[i] = static_cast<uint16_t>(bits);
        static_cast<uint16_t*>(r.param)[i] = tie_in_sign ? bf16_from_float(p) : rounded_up_by(p, 0x8000u);
        if (tie_in_sign && (bits & 0x1ffffu) == 0x8000u) {
          v[k] = __uint_as_float(__float_as_uint(v[k]) | 0x80000000u);
        }
      }
    }
    momentum.store(m, apart ? r.new_momentum : r.momentum, apart ? r.new_momentum_scales : r.momentum_scales,
                   [&](int64_t i) { return random.momentum(i); });
    variance.store(v, apart ? r.new_variance : r.variance, apart ? r.new_variance_scales : r.variance_scales,
                   [&](int64_t i) { return random.variance(i); });
  });
}

__global__ void __launch_bounds__(kThreads)
    expand_blocks(StateType type, const void* data, const float* scales, float* out, int64_t numel) {
  for_blocks(numel, [&](int64_t begin, int count) {
    float x[kPerLane];
    StateBlock{type, begin, count}.load(data, scales, x);
    StateBlock{StateType::kFloat32, begin, count}.store(x, out, nullptr, [](int64_t) { return 0u; });
  });
}

__global__ void __launch_bounds__(kThreads)
    compress_blocks(const float* in, StateType type, void* out, float* scales, int64_t numel, RandomKey key) {
  const RandomBits random{key};
  for_blocks(numel, [&](int64_t begin, int count) {
    float x[kPerLane];
    StateBlock{StateType::kFloat32, begin, count}.load(in, nullptr, x);
    StateBlock{type, begin, count}.store(x, out, scales, [&](int64_t i) { return random.momentum(i); });
  });
}

unsigned num_block_launches(int64_t numel) { return num_blocks(num_state_blocks(numel), kThreads / kWarp); }

}  // namespace

namespace {

template <class Scalars>
void update_by_blocks(const char* name, const AdamRange& range, const Scalars& scalars, cudaStream_t stream) {
  if (range.numel <= 0) return;
  with_dtype(range.grad_dtype, [&](auto grad) {
    with_dtype(range.param_dtype, [&](auto param) {
      update_blocks<decltype(grad)::value, decltype(param)::value, Scalars>
          <<<num_block_launches(range.numel), kThreads, 0, stream>>>(range, scalars);
      check_launch(name, range.numel);
    });
  });
}

}  // namespace

void adam(const AdamRange& range, const AdamScalars& scalars, cudaStream_t stream) {
  const bool whole_moments = range.momentum_type == StateType::kFloat32 && range.variance_type == StateType::kFloat32;
  if (!whole_moments || range.master_type == StateType::kNone) {
    return update_by_blocks("adam", range, scalars, stream);
  }
  const bool aligned = is_aligned(range.master, state_bytes(range.master_type, kFloatPack)) &&
                       is_aligned(range.momentum, 16) && is_aligned(range.variance, 16) &&
                       is_aligned(range.grad, kFloatPack * element_size(range.grad_dtype)) &&
                       is_aligned(range.param, kFloatPack * element_size(range.param_dtype));
  with_dtype(range.grad_dtype, [&](auto grad) {
    if (range.master_type == StateType::kLowerHalf) {
      const AdamBody<decltype(grad)::value, DType::kBFloat16, StateType::kLowerHalf> body{range, scalars};
      return launch<kFloatPack>("adam", body, aligned, range.numel, stream);
    }
    with_dtype(range.param_dtype, [&](auto param) {
      const AdamBody<decltype(grad)::value, decltype(param)::value, StateType::kFloat32> body{range, scalars};
      launch<kFloatPack>("adam", body, aligned, range.numel, stream);
    });
  });
}

void momentum_step(const AdamRange& range, const MomentumScalars& scalars, cudaStream_t stream) {
  update_by_blocks("momentum_step", range, scalars, stream);
}

void cast_from_float(const float* in, void* out, DType out_dtype, int64_t numel, cudaStream_t stream) {
  const bool aligned = is_aligned(in, 16) && is_aligned(out, kFloatPack * element_size(out_dtype));
  with_dtype(out_dtype, [&](auto type) {
    const CastBody<DType::kFloat32, decltype(type)::value> body{in, out};
    launch<kFloatPack>("cast_from_float", body, aligned, numel, stream);
  });
}

void cast_to_float(const void* in, DType in_dtype, float* out, int64_t numel, cudaStream_t stream) {
  const bool aligned = is_aligned(in, kFloatPack * element_size(in_dtype)) && is_aligned(out, 16);
  with_dtype(in_dtype, [&](auto type) {
    const CastBody<decltype(type)::value, DType::kFloat32> body{in, out};
    launch<kFloatPack>("cast_to_float", body, aligned, numel, stream);
  });
}

void add(void* sum, const void* x, DType dtype, int64_t numel, cudaStream_t stream) {
  const bool aligned = is_aligned(sum, 16) && is_aligned(x, 16);
  with_dtype(dtype, [&](auto type) {
    constexpr DType kType = decltype(type)::value;
    constexpr int kPack = static_cast<int>(16 / sizeof(typename Storage<kType>::Element));
    launch<kPack>("add", AddBody<kType, kType>{sum, x}, aligned, numel, stream);
  });
}

void add_to_float(float* sum, const void* x, DType x_dtype, int64_t numel, cudaStream_t stream) {
  const bool aligned = is_aligned(sum, 16) && is_aligned(x, kFloatPack * element_size(x_dtype));
  with_dtype(x_dtype, [&](auto type) {
    const AddBody<DType::kFloat32, decltype(type)::value> body{sum, x};
    launch<kFloatPack>("add_to_float", body, aligned, numel, stream);
  });
}

void sum_squares(const void* x, DType dtype, int64_t numel, double* partials, cudaStream_t stream) {
  if (numel <= 0) return;
  const unsigned blocks = num_blocks(num_square_partials(numel), 1);
  with_dtype(dtype, [&](auto type) {
    squares<decltype(type)::value><<<blocks, kSquaresLanes, 0, stream>>>(x, numel, partials);
    check_launch("sum_squares", numel);
  });
}

void expand_state(StateType type, const void* data, const float* scales, float* out, int64_t numel,
                  cudaStream_t stream) {
  if (numel <= 0) return;
  expand_blocks<<<num_block_launches(numel), kThreads, 0, stream>>>(type, data, scales, out, numel);
  check_launch("expand_state", numel);
}

void compress_state(const float* in, StateType type, void* out, float* scales, int64_t numel, const RandomKey& key,
                    cudaStream_t stream) {
  if (numel <= 0) return;
  compress_blocks<<<num_block_launches(numel), kThreads, 0, stream>>>(in, type, out, scales, numel, key);
  check_launch("compress_state", numel);
}

}  // namespace patrickstar::optim::cuda
