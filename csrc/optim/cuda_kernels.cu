// The optimizer kernels on CUDA (kernels.h; NaN as in kernel_body.inl). Torch-free. Intrinsics with an explicit
// rounding mode keep the compiler from contracting, whatever its flags.
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "common/cuda_elementwise.h"
#include "optim/cuda_kernels.h"
#include "optim/dynamic_map.h"

namespace patrickstar::optim::cuda {

namespace {

using namespace patrickstar::cuda;

// Elements per thread if a binary32 array takes part: 16 bytes of it.
constexpr int kFloatPack = 4;

// ---- Bodies ------------------------------------------------------------------------------------------

__device__ inline void adam_step(const AdamScalars& s, float g, float& p, float& m, float& v) {
  g = __fmul_rn(g, s.grad_scale);
  g = __fmaf_rn(s.weight_decay, p, g);
  p = __fmul_rn(p, s.decay);
  m = quiet(__fmaf_rn(s.one_minus_beta1, __fsub_rn(g, m), m));
  v = quiet(__fmaf_rn(__fmul_rn(s.one_minus_beta2, g), g, __fmul_rn(s.beta2, v)));
  const float d = __fmaf_rn(__fsqrt_rn(v), s.inv_sqrt_bias_correction2, s.eps);
  p = quiet(__fmaf_rn(-s.step_size, __fdiv_rn(m, d), p));
}

// 0 for zeros. NaN for non-finite values.
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

// The update of one element, by optimizer.
__device__ inline void step(const AdamScalars& s, float g, float& p, float& m, float& v) { adam_step(s, g, p, m, v); }
__device__ inline void step(const MomentumScalars& s, float g, float& p, float& m, float& /*v*/) {
  momentum_step(s, g, p, m);
}

// A thread loads all its elements before it stores any, so `param` may be `grad`.
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

struct ScaleBody {
  float* values;
  float factor;

  template <int kCount>
  __device__ void run(int64_t i) const {
    float x[kCount];
    load<DType::kFloat32>(values, i, x);
#pragma unroll
    for (int k = 0; k < kCount; ++k) x[k] = __fmul_rn(x[k], factor);
    store<DType::kFloat32>(values, i, x);
  }
};

// One thread block per block of elements, thread l for lane l: [Note: one order of summation].
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
      // Lanes from s on add values that no lane reads.
      for (int s = kSquaresLanes / 4; s > 0; s /= 2) sum = __dadd_rn(sum, __shfl_down_sync(0xffffffffu, sum, s));
      if (lane == 0) partials[block] = sum == sum ? sum : __longlong_as_double(0x7ff8000000000000ll);
    }
    __syncthreads();
  }
}
static_assert(kSquaresLanes == 64, "the accumulate in squares() takes two warps");

// One thread block per range, thread l for lane l, in the order of `WideSum`.
__global__ void __launch_bounds__(kSumLanes)
    add_up_partials(const double* partials, const PartialsRange* ranges, WideSum* sums) {
  const int lane = static_cast<int>(threadIdx.x);
  const PartialsRange range = ranges[blockIdx.x];
  __shared__ double high[kSumLanes];
  __shared__ double low[kSumLanes];
  WideSum sum;
#pragma unroll 8
  for (int64_t i = lane; i < range.count; i += kSumLanes) sum.add(partials[range.first + i]);
  for (int s = kSumLanes / 2; s > 0; s /= 2) {
    high[lane] = sum.high;
    low[lane] = sum.low;
    __syncthreads();
    if (lane < s) sum.add(WideSum{high[lane + s], low[lane + s]});
    __syncthreads();
  }
  if (lane == 0) sums[blockIdx.x] = sum;
}

// ---- States of fewer bytes ---------------------------------------------------------------------------

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kPerLane = static_cast<int>(kStateBlock) / kWarp;
constexpr int kQuad = 4;

// Four elements, moved by one instruction. (The compiler splits plain stores of them: use __stwb.)
template <class Element>
using Quad = std::conditional_t<sizeof(Element) == 4, uint4, std::conditional_t<sizeof(Element) == 2, uint2, uint32_t>>;

__device__ inline int lane() { return static_cast<int>(threadIdx.x) % kWarp; }

__device__ const DynamicMap device_signed_map = make_signed_map();
__device__ const DynamicMap device_unsigned_map = make_unsigned_map();

// [Note: random bits]
struct RandomBits {
  RandomKey key;
  Rounded rounded;

  // Bits of element i (even) in the lower half, of element i + 1 in the upper half.
  __device__ uint32_t two(int64_t i) const {
    const auto pair = static_cast<uint32_t>((key.first + i) >> 1);
    if (key.first % 2 == 0) return mixed(pair);
    return (mixed(pair) >> 16) | (mixed(pair + 1) << 16);
  }

 private:
  __device__ uint32_t mixed(uint32_t pair) const {
    uint32_t x = pair + key.a + static_cast<uint32_t>(rounded);
    x = (x ^ (x >> 16)) * 0x21f0aaadu;
    x = ((x ^ (x >> 15)) + key.b) * 0xd35a2d97u;
    return x ^ (x >> 15);
  }
};

__device__ inline uint16_t rounded_up_by(float x, uint32_t bits) {
  return static_cast<uint16_t>((__float_as_uint(quiet(x)) + bits) >> 16);
}

// 8-bit codes (dynamic_map.h). Each lane of a warp holds one table entry; all lanes look up at once, by the lowest five
// bits of an index. Tables by section repeat every kMapSections lanes. Values are looked up by the exponent of 2^24
// times the entry, which is the code as the highest byte of an integer. Lanes without an entry hold zero.
constexpr float kCodeUnit = 0x1p-24f;

template <bool kSigned>
struct Codes {
  float slope, offset, start, steps, first, last;

  __device__ Codes() {
    const DynamicMap& map = kSigned ? device_signed_map : device_unsigned_map;
    const int index = lane() % kMapSections;
    start = map.start[index];
    steps = map.steps[index];
    first = map.first[index];
    last = map.last[index];
    // Exponents of 1 (unsigned: of 2, since entry 1 is zero) to 128, and of entry 256.
    const bool has_entry = lane() >= (kSigned ? 23 : 24) && lane() < 31;
    slope = has_entry ? map.slope_by_exponent[index] * kCodeUnit : 0.0f;
    offset = has_entry ? map.offset_by_exponent[index] : !kSigned && lane() == 31 ? 1.0f : 0.0f;
  }
  static __device__ float lookup(float table, uint32_t index) {
    return __shfl_sync(kAllLanes, table, static_cast<int>(index));
  }
  __device__ float value(uint8_t code) const {
    const uint32_t high = static_cast<uint32_t>(code) << 24;
    // (The lower bits round the sum up to the next code's exponent, except for code 0.)
    const float x = kSigned ? __int2float_rn(static_cast<int>(high)) : __uint2float_rn(high | 0xffffffu);
    const uint32_t exponent = __float_as_uint(x) >> 23;
    return __fmaf_rn(x, lookup(slope, exponent), flip(lookup(offset, exponent), x));
  }
  // Encodes a value scaled to a magnitude of at most 1. A NaN gets zero's code.
  __device__ uint8_t code(float scaled) const {
    const float x = fmaxf(fabsf(scaled), kSigned ? kSignedLeast : kUnsignedLeast);
    const float guess = __fmaf_rn(__int2float_rn(__float_as_int(x)), kGuessSlope, kGuessOffset);
    uint32_t section = __float_as_uint(guess);
    if (x < lookup(start, section)) --section;
    const float place = __fmaf_rn(x, lookup(steps, section), lookup(first, section));
    const float end = lookup(last, section);
    if (kSigned) {
      // Tables are negated; no entry has the value -1.
      const float opposite = fminf(flip(fmaxf(place, end), scaled), 127.0f);
      return static_cast<uint8_t>(rounded(-opposite));
    }
    const uint32_t entry = fabsf(scaled) > 0.0f ? rounded(fminf(place, end)) : 1;
    return static_cast<uint8_t>(entry - 1);
  }

 private:
  // -x if `sign` is negative.
  static __device__ float flip(float x, float sign) {
    return __uint_as_float(__float_as_uint(x) ^ (__float_as_uint(sign) & 0x80000000u));
  }
  // Rounded to nearest even, in the lowest bits.
  static __device__ uint32_t rounded(float x) { return __float_as_uint(__fadd_rn(x, 0x1.8p23f)); }
};

// One block of a range, processed by a warp. `kWhole`: the block lies within the range and arrays are aligned for loads
// and stores of four elements. Otherwise elements from `count` on are outside and read as zeros.
template <bool kWhole>
struct StateBlock {
  int64_t begin;
  int count;

  static __device__ int element(int k) { return k / kQuad * (kQuad * kWarp) + lane() * kQuad + k % kQuad; }
  __device__ bool has(int k) const { return kWhole || element(k) < count; }

  // `array` starts with the range's first element.
  template <class Element>
  __device__ void load(const void* array, Element (&out)[kPerLane]) const {
    const Element* from = static_cast<const Element*>(array) + begin;
    if constexpr (kWhole) {
#pragma unroll
      for (int k = 0; k < kPerLane; k += kQuad) {
        const auto quad = *reinterpret_cast<const Quad<Element>*>(from + element(k));
        memcpy(out + k, &quad, sizeof(quad));
      }
    } else {
#pragma unroll
      for (int k = 0; k < kPerLane; ++k) out[k] = has(k) ? from[element(k)] : Element{};
    }
  }
  template <class Element>
  __device__ void store(void* array, const Element (&in)[kPerLane]) const {
    Element* to = static_cast<Element*>(array) + begin;
    if constexpr (kWhole) {
#pragma unroll
      for (int k = 0; k < kPerLane; k += kQuad) {
        Quad<Element> quad;
        memcpy(&quad, in + k, sizeof(quad));
        __stwb(reinterpret_cast<Quad<Element>*>(to + element(k)), quad);
      }
    } else {
#pragma unroll
      for (int k = 0; k < kPerLane; ++k) {
        if (has(k)) to[element(k)] = in[k];
      }
    }
  }

  // Stochastic rounding.
  __device__ void round(const float (&in)[kPerLane], const RandomBits& random, uint16_t (&out)[kPerLane]) const {
#pragma unroll
    for (int k = 0; k < kPerLane; k += 2) {
      const uint32_t two = random.two(begin + element(k));
      out[k] = rounded_up_by(in[k], two & 0xffffu);
      out[k + 1] = rounded_up_by(in[k + 1], two >> 16);
    }
  }

  // A state of any type except kLowerHalf.
  template <bool kSigned>
  __device__ void expand(StateType type, const void* data, const float* scales, const Codes<kSigned>& codes,
                         float (&out)[kPerLane]) const {
    if (type == StateType::kFloat32) return load(data, out);
    if (type == StateType::kBFloat16) {
      uint16_t halves[kPerLane];
      load(data, halves);
#pragma unroll
      for (int k = 0; k < kPerLane; ++k) out[k] = to_float<DType::kBFloat16>(halves[k]);
    } else if (is_8_bit(type)) {
      uint8_t bytes[kPerLane];
      load(data, bytes);
      const float scale = scales[begin / kStateBlock];
#pragma unroll
      for (int k = 0; k < kPerLane; ++k) out[k] = __fmul_rn(codes.value(bytes[k]), scale);
    } else {
#pragma unroll
      for (int k = 0; k < kPerLane; ++k) out[k] = 0.0f;
    }
  }
  template <bool kSigned>
  __device__ void compress(const float (&in)[kPerLane], StateType type, void* data, float* scales,
                           const Codes<kSigned>& codes, const RandomBits& random) const {
    if (type == StateType::kFloat32) return store(data, in);
    if (type == StateType::kBFloat16) {
      uint16_t halves[kPerLane];
      round(in, random, halves);
      store(data, halves);
    } else if (is_8_bit(type)) {
      const float inverse = find_scale(in, scales + begin / kStateBlock);
      uint8_t bytes[kPerLane];
#pragma unroll
      for (int k = 0; k < kPerLane; ++k) bytes[k] = codes.code(__fmul_rn(in[k], inverse));
      store(data, bytes);
    }
  }

 private:
  // Stores the scale and returns the factor for encoding, 0 if there is no ordinary scale.
  __device__ float find_scale(const float (&in)[kPerLane], float* to) const {
    int positive = 0;       // largest bits in signed order
    uint32_t negative = 0;  // largest bits in unsigned order, where negative floats rank highest
#pragma unroll
    for (int k = 0; k < kPerLane; ++k) {
      if (!has(k)) continue;
      positive = max(positive, __float_as_int(in[k]));
      negative = max(negative, __float_as_uint(in[k]));
    }
    for (int distance = kWarp / 2; distance > 0; distance /= 2) {
      positive = max(positive, __shfl_xor_sync(kAllLanes, positive, distance));
      negative = max(negative, __shfl_xor_sync(kAllLanes, negative, distance));
    }
    const auto most_positive = static_cast<uint32_t>(positive);
    const uint32_t most_negative = negative & 0x7fffffffu;  // or a positive value, if none is negative
    const bool is_positive = most_positive >= most_negative;
    const uint32_t most = is_positive ? most_positive : most_negative;
    const bool is_ordinary = most >= kLeastScaleBits && most < 0x7f800000u;
    const uint32_t ordinary = is_positive ? most : most | 0x80000000u;
    if (lane() == 0) *to = __uint_as_float(is_ordinary ? ordinary : most < kLeastScaleBits ? 0 : 0x7fc00000u);
    return is_ordinary ? __fdiv_rn(1.0f, __uint_as_float(ordinary)) : 0.0f;
  }
};

// Calls run(block) for each block of a range from element `first` on; a warp per block.
template <bool kWhole, class Run>
__device__ void for_blocks(int64_t first, int64_t numel, const Run& run) {
  const int64_t warp = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kWarp;
  const int64_t step = static_cast<int64_t>(gridDim.x) * (kThreads / kWarp);
  for (int64_t begin = first + warp * kStateBlock; begin < numel; begin += step * kStateBlock) {
    const int64_t rest = numel - begin;
    run(StateBlock<kWhole>{begin, static_cast<int>(rest < kStateBlock ? rest : kStateBlock)});
  }
}

// Masters of a block: an own array, split, or the parameter alone.
template <bool kWhole>
struct MasterBlock {
  const AdamRange& r;
  StateBlock<kWhole> block;
  bool has_sign;

  __device__ bool is_whole() const { return r.master_type == StateType::kFloat32; }
  // Removes the masters' signs from the variances: [Note: split masters].
  __device__ void load(float (&p)[kPerLane], float (&v)[kPerLane]) const {
    if (is_whole()) return block.load(r.master, p);
    uint16_t upper[kPerLane], lower[kPerLane] = {};
    block.load(r.param, upper);
    if (r.master_type == StateType::kLowerHalf) block.load(r.master, lower);
#pragma unroll
    for (int k = 0; k < kPerLane; ++k) {
      const uint32_t distance = static_cast<uint32_t>(static_cast<int32_t>(static_cast<int16_t>(lower[k])));
      p[k] = __uint_as_float((static_cast<uint32_t>(upper[k]) << 16) + distance);
      if (!has_sign) continue;
      p[k] = __uint_as_float(__float_as_uint(p[k]) + (__float_as_uint(v[k]) >> 31 << 16));
      v[k] = fabsf(v[k]);
    }
  }
  // Stores masters and parameters.
  template <DType kParam>
  __device__ void store(const float (&p)[kPerLane], float (&v)[kPerLane], const RandomBits& random) const {
    if (is_whole()) {
      block.store(r.new_master != nullptr ? r.new_master : r.master, p);
      if (r.param == nullptr) return;
      typename Storage<kParam>::Element rounded[kPerLane];
#pragma unroll
      for (int k = 0; k < kPerLane; ++k) rounded[k] = from_float<kParam>(p[k]);
      return block.store(r.param, rounded);
    }
    uint16_t upper[kPerLane], lower[kPerLane];
    if (r.master_type == StateType::kNone) {
      block.round(p, random, upper);
      return block.store(r.param, upper);
    }
#pragma unroll
    for (int k = 0; k < kPerLane; ++k) {
      const uint32_t bits = __float_as_uint(p[k]);
      lower[k] = static_cast<uint16_t>(bits);
      upper[k] = has_sign ? bf16_from_float(p[k]) : rounded_up_by(p[k], 0x8000u);
      if (has_sign && (bits & 0x1ffffu) == 0x8000u) v[k] = __uint_as_float(__float_as_uint(v[k]) | 0x80000000u);
    }
    block.store(r.master, lower);
    block.store(r.param, upper);
  }
};

// States of any types; the parameter is bfloat16 unless the master is float32. A block is loaded whole before it is
// stored, so `param` may be `grad`. `kCoded`: moments are 8-bit, known at compile time.
template <DType kGrad, DType kParam, bool kCoded, bool kWhole, class Scalars>
__global__ void __launch_bounds__(kThreads) update_blocks(AdamRange r, Scalars s, int64_t first) {
  constexpr bool kHasVariance = std::is_same_v<Scalars, AdamScalars>;
  const StateType momentum_type = kCoded ? StateType::kSigned8 : r.momentum_type;
  const StateType variance_type = !kHasVariance ? StateType::kNone : kCoded ? StateType::kUnsigned8 : r.variance_type;
  const bool apart = r.new_master != nullptr;
  const Codes<true> signed_codes;
  const Codes<false> unsigned_codes;
  for_blocks<kWhole>(first, r.numel, [&](const StateBlock<kWhole>& block) {
    const MasterBlock<kWhole> master{r, block,
                                     r.master_type == StateType::kLowerHalf && variance_type == StateType::kFloat32};
    typename Storage<kGrad>::Element grad[kPerLane];
    float p[kPerLane], m[kPerLane], v[kPerLane];
    block.load(r.grad, grad);
    block.expand(momentum_type, r.momentum, r.momentum_scales, signed_codes, m);
    block.expand(variance_type, r.variance, r.variance_scales, unsigned_codes, v);
    master.load(p, v);
#pragma unroll
    for (int k = 0; k < kPerLane; ++k) step(s, to_float<kGrad>(grad[k]), p[k], m[k], v[k]);
    master.template store<kParam>(p, v, {r.key, Rounded::kParam});
    block.compress(m, momentum_type, apart ? r.new_momentum : r.momentum,
                   apart ? r.new_momentum_scales : r.momentum_scales, signed_codes, {r.key, Rounded::kMomentum});
    block.compress(v, variance_type, apart ? r.new_variance : r.variance,
                   apart ? r.new_variance_scales : r.variance_scales, unsigned_codes, {r.key, Rounded::kVariance});
  });
}

template <bool kSigned, bool kWhole>
__global__ void __launch_bounds__(kThreads)
    expand_blocks(StateType type, const void* data, const float* scales, float* out, int64_t numel, int64_t first) {
  const Codes<kSigned> codes;
  for_blocks<kWhole>(first, numel, [&](const StateBlock<kWhole>& block) {
    float x[kPerLane];
    block.expand(type, data, scales, codes, x);
#pragma unroll
    for (int k = 0; k < kPerLane; ++k) {
      if (is_8_bit(type)) x[k] = quiet(x[k]);
    }
    block.store(out, x);
  });
}

template <bool kSigned, bool kWhole>
__global__ void __launch_bounds__(kThreads) compress_blocks(const float* in, StateType type, void* out, float* scales,
                                                            int64_t numel, RandomKey key, int64_t first) {
  const RandomBits random{key, Rounded::kMomentum};
  const Codes<kSigned> codes;
  for_blocks<kWhole>(first, numel, [&](const StateBlock<kWhole>& block) {
    float x[kPerLane];
    block.load(in, x);
    block.compress(x, type, out, scales, codes, random);
  });
}

// Limit of thread blocks: on a long range a warp processes several blocks and loads its tables once. Enough warps
// remain for any device.
constexpr int64_t kMaxBlockLaunches = 4096;

// Calls launch_kernel(Whole, number of thread blocks, numel, first) for the whole blocks in aligned arrays, and for the
// rest.
template <class LaunchKernel>
void launch_blocks(const char* name, int64_t numel, bool aligned, const LaunchKernel& launch_kernel) {
  const int64_t whole = aligned ? numel / kStateBlock * kStateBlock : 0;
  const auto launch_part = [&](auto is_whole, int64_t first, int64_t end) {
    if (first == end) return;
    const unsigned needed = num_blocks(num_state_blocks(end - first), kThreads / kWarp);
    launch_kernel(is_whole, needed < kMaxBlockLaunches ? needed : static_cast<unsigned>(kMaxBlockLaunches), end, first);
    check_launch(name, numel);
  };
  launch_part(std::true_type(), 0, whole);
  launch_part(std::false_type(), whole, numel);
}

}  // namespace

namespace {

// True if four elements can be loaded and stored at once.
bool is_quads(const void* array, StateType type) {
  return type == StateType::kNone || is_aligned(array, is_8_bit(type) ? kQuad : state_bytes(type, kQuad));
}
bool are_quads(const AdamRange& r) {
  return is_quads(r.master, r.master_type) && is_quads(r.new_master, r.master_type) &&
         is_quads(r.momentum, r.momentum_type) && is_quads(r.new_momentum, r.momentum_type) &&
         is_quads(r.variance, r.variance_type) && is_quads(r.new_variance, r.variance_type) &&
         is_aligned(r.grad, kQuad * element_size(r.grad_dtype)) &&
         is_aligned(r.param, kQuad * element_size(r.param_dtype));
}

template <class Scalars>
void update_by_blocks(const char* name, const AdamRange& range, const Scalars& scalars, cudaStream_t stream) {
  if (range.numel <= 0) return;
  constexpr bool kHasVariance = std::is_same_v<Scalars, AdamScalars>;
  const bool coded =
      range.momentum_type == StateType::kSigned8 && (!kHasVariance || range.variance_type == StateType::kUnsigned8);
  const auto launch_with = [&](auto grad, auto param, auto is_coded) {
    launch_blocks(name, range.numel, are_quads(range), [&](auto whole, unsigned blocks, int64_t end, int64_t first) {
      AdamRange part = range;
      part.numel = end;
      update_blocks<decltype(grad)::value, decltype(param)::value, is_coded && whole, whole>
          <<<blocks, kThreads, 0, stream>>>(part, scalars, first);
    });
  };
  constexpr Tag<DType::kBFloat16> kHalf;
  if (coded && range.grad_dtype == DType::kBFloat16 && range.param_dtype == DType::kBFloat16) {
    return launch_with(kHalf, kHalf, std::true_type());
  }
  with_dtype(range.grad_dtype, [&](auto grad) {
    with_dtype(range.param_dtype, [&](auto param) { launch_with(grad, param, std::false_type()); });
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

void scale(float* values, float factor, int64_t numel, cudaStream_t stream) {
  launch<kFloatPack>("scale", ScaleBody{values, factor}, is_aligned(values, 16), numel, stream);
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

void add_up(const double* partials, const PartialsRange* ranges, int64_t num_ranges, WideSum* sums,
            cudaStream_t stream) {
  if (num_ranges <= 0) return;
  add_up_partials<<<static_cast<unsigned>(num_ranges), kSumLanes, 0, stream>>>(partials, ranges, sums);
  check_launch("add_up", num_ranges);
}

namespace {

// Calls launch(std::bool_constant<true if the map is signed>()).
template <class Launch>
void with_sign(StateType type, const Launch& launch) {
  if (type == StateType::kSigned8) return launch(std::true_type());
  launch(std::false_type());
}

}  // namespace

void expand_state(StateType type, const void* data, const float* scales, float* out, int64_t numel,
                  cudaStream_t stream) {
  if (numel <= 0) return;
  with_sign(type, [&](auto is_signed) {
    launch_blocks("expand_state", numel, is_quads(data, type) && is_quads(out, StateType::kFloat32),
                  [&](auto whole, unsigned blocks, int64_t end, int64_t first) {
                    expand_blocks<decltype(is_signed)::value, decltype(whole)::value>
                        <<<blocks, kThreads, 0, stream>>>(type, data, scales, out, end, first);
                  });
  });
}

void compress_state(const float* in, StateType type, void* out, float* scales, int64_t numel, const RandomKey& key,
                    cudaStream_t stream) {
  if (numel <= 0) return;
  with_sign(type, [&](auto is_signed) {
    launch_blocks("compress_state", numel, is_quads(out, type) && is_quads(in, StateType::kFloat32),
                  [&](auto whole, unsigned blocks, int64_t end, int64_t first) {
                    compress_blocks<decltype(is_signed)::value, decltype(whole)::value>
                        <<<blocks, kThreads, 0, stream>>>(in, type, out, scales, end, key, first);
                  });
  });
}

}  // namespace patrickstar::optim::cuda
