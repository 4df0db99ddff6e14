// Blocks of states of fewer bytes on CUDA, a warp for each: loads, rounding, expansion, compression, masters.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/cuda_elementwise.h"
#include "optim/dynamic_map.h"
#include "optim/kernels.h"

namespace patrickstar::optim::cuda {

using namespace patrickstar::cuda;

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

}  // namespace patrickstar::optim::cuda
