// The leaf kernels of the optimizer: fused Adam, casts, gradient sums, gradient statistics.
//
// Vocabulary and numerics are written down here once; every implementation (scalar, AVX2, AVX-512,
// CUDA) gives the same bits for the same input.  [Note: one order of operations]
//
// Each arithmetic step below is one correctly rounded IEEE-754 binary32 operation (round to nearest
// even; no flush of denormals, no contraction, no fast-math), executed in the order written:
//
//   g = float(grad) * grad_scale            1/loss_scale times the clipping coefficient
//   p = master
//   g = fma(weight_decay, p, g)             Adam's L2 term (0 with decoupled decay)
//   p = p * decay                           AdamW's decoupled decay 1 - lr*wd (1 with L2)
//   m = fma(one_minus_beta1, g - m, m)
//   v = fma(one_minus_beta2 * g, g, beta2 * v)
//   d = fma(sqrt(v), inv_sqrt_bias_correction2, eps)
//   p = fma(-step_size, m / d, p)           step_size = lr / bias_correction1
//   master, momentum, variance = p, m, v;  param = round(p)
//
// (Kingma & Ba 2015, algorithm 1; Loshchilov & Hutter 2019, algorithm 2; the arrangement is that of
// torch.optim.Adam.) Casts to 16 bits round to nearest even; a NaN becomes the quiet NaN 0x7fc0
// (bfloat16) or 0x7e00 (float16), whatever its payload and sign were.
//
// [Note: split masters] A bfloat16 parameter is the upper half of its float32 master, rounded to nearest even, so
// beside it 16 bits restore the master: the signed distance to it, in units of the master's last place. (They are the
// master's lower half.) One case is left: an even upper half is the nearest of 2^16 + 1 masters, those halfway to its
// neighbours included, whose distances -2^15 and 2^15 have the same 16 bits. The bit that tells them apart is the sign
// of the variance, which is never negative: set where the distance is 2^15.
//
//   master = bits(param) * 2^16 + signed(lower) + (sign of variance ? 2^16 : 0)
//
// So an update reads and writes the bits that it would with a whole master. What a NaN's payload was is lost when it is
// split; arithmetic yields none but the canonical one.
//
// A variance of fewer bytes has no sign to spare, and lends none (also as bfloat16). The parameter beside it is
// therefore rounded to nearest with ties away from zero, so that 16 bits hold every distance: the master stays exact,
// and the parameter differs from round(master) where that is a tie whose upper half is even, about once in 2^17 values.
//
// [Note: states of fewer bytes] They are expanded to float32, which is exact, and updated by the operations above. The
// parameter is made of the new moments as they are then; after that these are stored in fewer bits. So nothing but what
// the next step reads is rounded.
//
// [Note: random bits] bfloat16 states are rounded stochastically: 16 random bits r are added to the bits of the
// float32, and the lower half is cut off, so that the mean over r is the value. (A NaN becomes 0x7fc0, infinities stay;
// what is above the largest bfloat16 may become infinite.) A bfloat16 parameter without master is rounded so too. Two
// neighbours share a hash of 32 bits: element e = first + i of a range with key (a, b, first) has
//
//   x = uint32(e >> 1) + a + d         d = 0 for momentum, 0x9e3779b9 for variance, 0x3c6ef372 for the parameter
//   x = (x ^ x >> 16) * 0x21f0aaad
//   x = ((x ^ x >> 15) + b) * 0xd35a2d97
//   x = x ^ x >> 15                    r = x & 0xffff where e is even, x >> 16 where it is odd
//
// That is a counter in a hash of hash-prospector (C. Wellons 2018, "Prospecting for Hash Functions"; these constants
// are of TheIronBorn, in its issue 19), which searches for how evenly each input bit flips each output bit. It is no
// generator for cryptography, nor need it be: rounding asks for bits that are uniform, and not correlated with values,
// with neighbours', or with the same element's in other steps. What tells steps, parameters and roundings apart is
// where their counters start, a + d: b alone would leave bits alike. Elements 2^33 apart share their bits.
//
// [Note: states of 8 bits] Blocks of kStateBlock elements, by the dynamic map of Dettmers et al. 2021 (arXiv
// 2110.02861; create_dynamic_map of bitsandbytes), signed for momentum and unsigned for variance; dynamic_map.h has the
// constants.
//
//   scale = the element of the largest magnitude in the block, the positive one of two; inverse = 1 / scale
//   code = the entry nearest to x * inverse    found by the operations in dynamic_map.h; see below
//   x = map(code) * scale
//
// The code of any x * inverse but zero is never zero's in the unsigned map (for which a magnitude stands, though no
// variance is negative): a variance that is lost would make the next update of its element up to 1 / sqrt(1 - beta2)
// times too large, and leads parameters farther from exact Adam's than all other roundings together
// (benchmark/results/cpu-eight-bit.txt). As published, the nearest entry may be zero.
//
// The codes of a signed map are those of bitsandbytes less 127, so that zero bytes are zero; those of an unsigned map
// are the same. There a scale is a magnitude; but the signed map has an entry for 1 and none for -1, so that a negative
// element of the largest magnitude would lose 0.7 % of it. With its sign in the scale it is exact, and compressing what
// was expanded gives the same codes and scales: float32 values in checkpoints stand for what was stored, to the last
// bit. For that a block whose largest magnitude is below 2^-100 is stored as zeros, since its least entries would be
// subnormal numbers. One with a NaN or an infinity gets a NaN as its scale and is all NaN from then on.
//
// [Note: optimizers of one moment] Lion (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", algorithm
// 2) and SGD with momentum (torch.optim.SGD) have no variance. With g, p, weight_decay and decay as in Adam:
//
//   Lion       c = fma(one_minus_beta1, g - m, m)             beta1 * m + (1 - beta1) * g
//              m = fma(one_minus_beta2, g - m, m)
//              u = sign(c)                                    0 of zeros, NaN where c is not finite
//   SGD        m = fma(one_minus_dampening, g, momentum_factor * m)
//              u = m
//   Nesterov   m = fma(one_minus_dampening, g, momentum_factor * m)
//              u = fma(momentum_factor, m, g)
//
//   p = fma(-step_size, u, p * decay)                         step_size = lr
//
// In float32 these are the bits of torch.optim.SGD on a processor with fma. It makes the first momentum of the whole
// gradient, whatever the dampening: callers give 1 for one_minus_dampening in the first step. States are stored in
// fewer bytes as Adam's are; a split master has no variance to lend it a sign, so its parameter is rounded as beside a
// variance of fewer bytes.
//
// [Note: settled values] The scale of gradients holds the clipping coefficient, which is known when all gradients are.
// A 16-bit parameter is nearly always the same for all scales near the last one: a step changes it by a small part of
// its last place. Every operation above is monotonic in each of its operands, rounding included, so bounds of the scale
// give bounds of g, m, v and p, by the same operations: with 0 <= least <= most, v is least and most at these, m at
// either, m / d lies between the least m over the d that takes it farther down and the most m over the one that takes
// it up, and p between what these give. (Bounds of d and of quotients are wider by what approximations of roots and
// inverses are wrong by, so how many values are open differs between processors.) Where both ends round to the same 16
// bits, so does all between: the value is settled. Where they do not, or one of them is no number, the value is open,
// and made when the scale is known, from its inputs, which are copied to lie side by side: where they are they lie far
// apart, and to read them there takes nearly as long as to read all. (Bounds hold without L2 term, which may turn g's
// sign; all is open where Adam's weight_decay is not 0. An optimizer of one moment squares nothing, so there g may turn
// its sign; its values are computed exactly at both ends.)
//
// [Note: values in place] What the next forward needs of an update is the new parameter. Of a split master ([Note:
// split masters]) it may take the old one's place before it is known that the update is the step's: lower half, moments
// and gradient are what they were, and the old upper half follows from them. The masters that have this lower half lie
// 2^16 units in the last place apart; the old one is that of them which is nearest to where the new value came from:
//
//   q = m' / d                             by approximations; m' and d of the gradient times the least scale
//   x = (float(param) + step_size * q) / decay
//   master = the nearest to x in bits of those at this distance from a multiple of 2^16
//
// That finds it unless the update is about as large as the parameter or larger, whose rounding then has lost what the
// old one was. So whoever puts a value in place looks whether the old one would be found; where it would not, the
// parameter stays and is open, as it is where it is not settled. At a learning rate of 1e-4 that is one value in a
// hundred or fewer. States are updated behind from the masters that are found, and what that makes of parameters must
// be what is in place. An update that turns out to be another one is taken back. All bits are those of adam. (Adam's
// weight_decay must be 0, as for settled values, and gradients bfloat16.)
//
// Sum of squares: [Note: one order of summation] elements are taken in blocks of kSquaresBlock. Within
// a block, lane l of kSquaresLanes holds a binary64 sum of the squares of elements l, l + lanes,
// l + 2*lanes, ..., added in that order by fma(x, x, sum); then lanes are folded in halves:
// for (s = lanes/2; s > 0; s /= 2) lane[l] += lane[l + s] for l < s. lane[0] is the block's partial. So a
// tensor's statistic does not depend on chunk size, device, ISA or number of threads. A partial is
// finite exactly when every element of its block is.
//
// All functions take raw pointers, allocate nothing, throw nothing, and may be called from any thread
// on disjoint ranges. No alignment beyond the element's own is required; 64 bytes is fastest.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace patrickstar::optim {

constexpr int64_t kSquaresBlock = 4096;
constexpr int64_t kSquaresLanes = 64;

// [Note: settled values]: the open ones of a piece of at most kOpenPiece elements, whose inputs are of 16 bits as well.
constexpr int64_t kOpenPiece = 1 << 16;
struct OpenValues {
  static constexpr int64_t kAll = -1;
  static constexpr int64_t kBytes = 16;  // of one
  int64_t count = 0;                     // kAll: more than there is room for
  int64_t capacity = 0;
  float* master = nullptr;
  float* momentum = nullptr;
  float* variance = nullptr;  // of Adam
  uint16_t* grad = nullptr;
  uint16_t* index = nullptr;  // in the piece

  // `capacity * kBytes` bytes at `data`.
  static OpenValues in(void* data, int64_t capacity) {
    auto* floats = static_cast<float*>(data);
    auto* halves = reinterpret_cast<uint16_t*>(floats + 3 * capacity);
    return {0, capacity, floats, floats + capacity, floats + 2 * capacity, halves, halves + capacity};
  }
};

constexpr int64_t num_open_pieces(int64_t numel) { return (numel + kOpenPiece - 1) / kOpenPiece; }
constexpr int64_t num_square_partials(int64_t numel) { return (numel + kSquaresBlock - 1) / kSquaresBlock; }

// What one step of Adam needs beside the arrays; the same for all tensors of a parameter group that
// have the same step count.
struct AdamScalars {
  float grad_scale;
  float weight_decay;
  float decay;
  float beta2;
  float one_minus_beta1;
  float one_minus_beta2;
  float inv_sqrt_bias_correction2;
  float eps;
  float step_size;
};

// [Note: optimizers of one moment]
enum class MomentumRule : uint8_t { kLion, kSgd, kNesterov };

// What one of their steps needs beside the arrays, as AdamScalars. Fields of other rules are not read.
struct MomentumScalars {
  MomentumRule rule;
  float grad_scale;
  float weight_decay;
  float decay;
  float step_size;
  float one_minus_beta1;      // Lion
  float one_minus_beta2;      // Lion
  float momentum_factor;      // SGD, Nesterov
  float one_minus_dampening;  // SGD, Nesterov
};

// Of [Note: random bits]: with one for each step and parameter, and `first` counted from the parameter's first element,
// results depend neither on placement nor on how ranges are cut.
struct RandomKey {
  uint32_t a = 0;
  uint32_t b = 0;
  int64_t first = 0;
};

// What is rounded, as what it adds to the counter of its bits: multiples of 2^32 / the golden ratio.
enum class Rounded : uint32_t { kMomentum = 0, kVariance = 0x9e3779b9u, kParam = 0x3c6ef372u };

// The finalizer of SplitMix64 (Steele, Lea & Flood 2014, "Fast splittable pseudorandom number generators").
constexpr uint64_t mix_key(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}
// `first`: of the range, in the parameter.
constexpr RandomKey random_key(uint64_t seed, int64_t step, int64_t param, int64_t first) {
  constexpr uint64_t kGoldenRatio = 0x9e3779b97f4a7c15u;
  uint64_t x = mix_key(seed + kGoldenRatio);
  x = mix_key(x + kGoldenRatio * static_cast<uint64_t>(step + 1));
  x = mix_key(x + kGoldenRatio * static_cast<uint64_t>(param + 1));
  return {static_cast<uint32_t>(x), static_cast<uint32_t>(x >> 32), first};
}

// One contiguous range of elements. `param` may be the same address as `grad` when their element sizes
// are equal (the new parameter then takes the gradient's place), or null when no compute copy is wanted. With `new_*`
// the old states stay as they are and the new ones go there (of all states or none, apart from everything else).
//
// With lower halves as its master, or none, `param` is bfloat16, apart from `grad` and never null; it is read as well,
// the new states take the old ones' place, and adam and momentum_step alone take such a range.
//
// States of 8 bits have scales, those of the blocks from the range's first one on. The range begins with a block; its
// last one may be shorter than a block: elements behind it are neither read nor written, and have no part in the scale.
struct AdamRange {
  void* master;    // of `master_type`; null where that is kNone
  void* momentum;  // of `momentum_type`
  void* variance;  // of `variance_type`
  const void* grad;
  void* param;
  DType grad_dtype;
  DType param_dtype;
  int64_t numel;
  float* new_master = nullptr;
  void* new_momentum = nullptr;
  void* new_variance = nullptr;
  StateType master_type = StateType::kFloat32;    // or kLowerHalf, or kNone: `param` is all there is
  StateType momentum_type = StateType::kFloat32;  // or kBFloat16, kSigned8
  StateType variance_type = StateType::kFloat32;  // or kBFloat16, kUnsigned8; kNone for momentum_step
  float* momentum_scales = nullptr;
  float* variance_scales = nullptr;
  float* new_momentum_scales = nullptr;
  float* new_variance_scales = nullptr;
  RandomKey key = {};
};

// One ISA's functions. Obtained from cpu_kernels() or cpu_kernels_named(); tables are constant.
struct CpuKernels {
  const char* isa;
  void (*adam)(const AdamRange& range, const AdamScalars& scalars);
  // What adam would store to `param`, which is apart from all else here; nothing else is written.
  void (*adam_param)(const AdamRange& range, const AdamScalars& scalars);
  // [Note: settled values], of at most kOpenPiece elements: what adam_param stores for each grad_scale from that of
  // `scalars` to `most_grad_scale`, where it is settled; the others go to `open`. `grad` and `param` are of one dtype
  // of 16 bits.
  void (*adam_param_between)(const AdamRange& range, const AdamScalars& scalars, float most_grad_scale,
                             OpenValues* open);
  // These others, now that the scale is known.
  void (*adam_param_open)(const AdamRange& range, const AdamScalars& scalars, const OpenValues& open);
  // [Note: values in place], of at most kOpenPiece elements of a split master: param becomes what adam makes of it for
  // each grad_scale from that of `scalars` to `most_grad_scale`, but for those that go to `open`. Where that has no
  // room for them (kAll), nothing is changed.
  void (*adam_put_values)(const AdamRange& range, const AdamScalars& scalars, float most_grad_scale, OpenValues* open);
  // Now that the scale is known: the open ones; of kAll the whole update.
  void (*adam_put_open_values)(const AdamRange& range, const AdamScalars& scalars, const OpenValues& open);
  // Then the states, unless all were open. `least_grad_scale` is that of adam_put_values. Returns of how many elements
  // the new parameter is not the one in place: none, unless memory was changed in between.
  int64_t (*adam_put_states)(const AdamRange& range, const AdamScalars& scalars, float least_grad_scale,
                             const OpenValues& open);
  // Instead of both: param is what it was before adam_put_values with these `scalars`.
  void (*adam_take_values_back)(const AdamRange& range, const AdamScalars& scalars, const OpenValues& open);
  // [Note: split masters]: what restores master[i], NaN apart, and leaves |variance[i]| as it is. `variance` is null
  // where that is of fewer bytes.
  void (*split_master)(const float* master, uint16_t* param, uint16_t* lower, float* variance, int64_t numel);
  // and back
  void (*join_master)(const uint16_t* param, const uint16_t* lower, const float* variance, float* master,
                      int64_t numel);
  // out[i] = round(in[i])
  void (*cast_from_float)(const float* in, void* out, DType out_dtype, int64_t numel);
  // out[i] = float(in[i])
  void (*cast_to_float)(const void* in, DType in_dtype, float* out, int64_t numel);
  // sum[i] = round(float(sum[i]) + float(x[i])), both of `dtype`: what torch's add does
  void (*add)(void* sum, const void* x, DType dtype, int64_t numel);
  // sum[i] = sum[i] + float(x[i])
  void (*add_to_float)(float* sum, const void* x, DType x_dtype, int64_t numel);
  // partials[b] for every block b of x, see [Note: one order of summation]
  void (*sum_squares)(const void* x, DType dtype, int64_t numel, double* partials);
  // A state of `type` (no lower halves) as float32, and back: what adam reads, and what it stores of the values `in` as
  // a momentum. `scales` is null but for 8 bits.
  void (*expand_state)(StateType type, const void* data, const float* scales, float* out, int64_t numel);
  void (*compress_state)(const float* in, StateType type, void* out, float* scales, int64_t numel,
                         const RandomKey& key);
  // [Note: optimizers of one moment]: adam and the passes beside it of `scalars.rule`, over ranges whose variances are
  // null and of kNone.
  void (*momentum_step)(const AdamRange& range, const MomentumScalars& scalars);
  void (*momentum_param)(const AdamRange& range, const MomentumScalars& scalars);
  void (*momentum_param_between)(const AdamRange& range, const MomentumScalars& scalars, float most_grad_scale,
                                 OpenValues* open);
  void (*momentum_param_open)(const AdamRange& range, const MomentumScalars& scalars, const OpenValues& open);
};

// Those of chosen_isa() (common/isa.h), which says what is thrown.
const CpuKernels& cpu_kernels();

// A given ISA's table, or null when it is unknown or this processor lacks it.
const CpuKernels* cpu_kernels_named(const char* isa);

}  // namespace patrickstar::optim
