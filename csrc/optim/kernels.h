// The optimizer kernels: fused Adam, casts, gradient sums, gradient statistics.
//
// [Note: one order of operations] Every implementation (scalar, AVX2, AVX-512, CUDA) gives the same bits for the same
// input. Each arithmetic step below is one correctly rounded IEEE-754 binary32 operation in the order written: round to
// nearest even, no flush of denormals, no contraction, no fast-math.
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
// (Kingma & Ba 2015, algorithm 1; Loshchilov & Hutter 2019, algorithm 2; arranged as in torch.optim.Adam.) Casts to 16
// bits round to nearest even. Every NaN becomes the quiet NaN 0x7fc0 (bfloat16) or 0x7e00 (float16).
//
// States of fewer bytes are expanded to float32, which is exact. The parameter is computed from the new float32
// moments; afterwards the moments are stored in fewer bits. Only the next step reads rounded values.
//
// [Note: split masters] A bfloat16 parameter is the upper half of its float32 master, rounded to nearest even. 16 more
// bits restore the master: its signed distance from the parameter, in units of the master's last place. (They equal the
// master's lower half.) One case is ambiguous: an even upper half is nearest to 2^16 + 1 masters, and the distances
// -2^15 and 2^15 have the same 16 bits. The sign of the variance, which is never negative, tells them apart: set for
// 2^15.
//
//   master = bits(param) * 2^16 + signed(lower) + (sign of variance ? 2^16 : 0)
//
// Updates give the bits of a whole master. Splitting loses the payload of a NaN; arithmetic yields only canonical ones.
// A variance that is not float32 lends no sign bit. Its parameter is then rounded to nearest with ties away from zero,
// so 16 bits hold every distance and the master stays exact. The parameter differs from round(master) on ties with an
// even upper half, about once in 2^17 values.
//
// [Note: one order of summation] Sums of squares use blocks of kSquaresBlock elements. Within a block, lane l of
// kSquaresLanes holds a binary64 sum of the squares of elements l, l + lanes, l + 2*lanes, ..., added in this order by
// fma(x, x, sum). Lanes are then added in halves: for (s = lanes/2; s > 0; s /= 2) lane[l] += lane[l + s] for l < s.
// lane[0] is the block's partial. A tensor's statistic therefore does not depend on chunk size, device, ISA or number
// of threads. A partial is finite exactly if every element of its block is.
//
// All functions take raw pointers, allocate nothing, throw nothing, and may run on any thread on disjoint ranges. They
// require no alignment beyond the element's own; 64 bytes is fastest.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace patrickstar::optim {

constexpr int64_t kSquaresBlock = 4096;
constexpr int64_t kSquaresLanes = 64;

// [Note: scale-independent values] The gradients' scale contains the clipping coefficient, which is unknown until all
// gradients are there. A 16-bit parameter is nearly always the same for all scales near the last one, because a step
// changes it by a small part of its last place.
//
// Every operation of an update is monotonic in each operand, rounding included. Bounds 0 <= least <= most of the scale
// therefore give bounds of g, m, v and p by the same operations. v is least and most at the ends of the scale, m at
// either end. m / d lies between the least m over the d that lowers it further and the most m over the d that raises
// it. If both bounds of p round to the same 16 bits, the value is scale-independent. Otherwise, or if a bound is NaN,
// it is scale-dependent: its inputs are copied here and the update is computed when the scale is known. (Reading them
// in place would take nearly as long as reading all values.)
//
// Bounds of d and of quotients include the errors of approximate roots and inverses, so the number of scale-dependent
// values differs between processors. With Adam's weight_decay every value is scale-dependent, because the L2 term may
// change the sign of g. Optimizers without a variance compute both ends exactly and allow it.
//
// `ScaleDependentValues` lists the scale-dependent values of a piece of at most kScaleDependentPiece elements.
// Parameters and gradients are 16-bit.
//
// [Note: values in place] In-place speculative updates of split masters. The next forward needs only the new parameter,
// so it may replace the old one before the gradients' scale is known. Lower half, moments and gradient stay unchanged,
// and the old master follows from them. Masters with the same lower half are 2^16 units in the last place apart; the
// old one is the nearest to x:
//
//   q = m' / d                             by approximations; m' and d at the least scale
//   x = (float(param) + step_size * q) / decay
//   master = the value nearest to x among those at this distance from a multiple of 2^16, as bits
//
// The search fails only for an update about as large as the parameter or larger, whose rounding has lost the old value.
// Every value is therefore checked before it is replaced. If the search would fail, or if the value is scale-dependent,
// the old parameter stays and the value joins `ScaleDependentValues`. At a learning rate of 1e-4 that is at most one
// value in a hundred. States are updated later from the masters found, and must lead to the parameters in place. An
// update that turns out to differ is rolled back. All bits are those of adam. Requires weight_decay 0 for Adam and
// bfloat16 gradients.
constexpr int64_t kScaleDependentPiece = 1 << 16;
struct ScaleDependentValues {
  static constexpr int64_t kAll = -1;
  static constexpr int64_t kBytes = 16;  // per value
  int64_t count = 0;                     // kAll: more values than capacity
  int64_t capacity = 0;
  float* master = nullptr;
  float* momentum = nullptr;
  float* variance = nullptr;  // Adam only
  uint16_t* grad = nullptr;
  uint16_t* index = nullptr;  // index in the piece

  // Uses `capacity * kBytes` bytes at `data`.
  static ScaleDependentValues in(void* data, int64_t capacity) {
    auto* floats = static_cast<float*>(data);
    auto* halves = reinterpret_cast<uint16_t*>(floats + 3 * capacity);
    return {0, capacity, floats, floats + capacity, floats + 2 * capacity, halves, halves + capacity};
  }
};

constexpr int64_t num_scale_dependent_pieces(int64_t numel) {
  return (numel + kScaleDependentPiece - 1) / kScaleDependentPiece;
}
constexpr int64_t num_square_partials(int64_t numel) { return (numel + kSquaresBlock - 1) / kSquaresBlock; }

// Scalars of one Adam step, equal for all tensors of a parameter group with the same step count.
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

// Optimizers with a momentum and no variance: Lion (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms",
// algorithm 2) and SGD with momentum (torch.optim.SGD). With g, p, weight_decay and decay as in Adam:
//
//   Lion       c = fma(one_minus_beta1, g - m, m)             beta1 * m + (1 - beta1) * g
//              m = fma(one_minus_beta2, g - m, m)
//              u = sign(c)                                    0 for zeros, NaN if c is not finite
//   SGD        m = fma(one_minus_dampening, g, momentum_factor * m)
//              u = m
//   Nesterov   m = fma(one_minus_dampening, g, momentum_factor * m)
//              u = fma(momentum_factor, m, g)
//
//   p = fma(-step_size, u, p * decay)                         step_size = lr
//
// In float32 these are the bits of torch.optim.SGD on a processor with fma. torch.optim.SGD ignores the dampening in
// the first step, so callers pass one_minus_dampening = 1 there. States of fewer bytes work as in Adam. Split masters
// are rounded as beside a variance that is not float32.
enum class MomentumRule : uint8_t { kLion, kSgd, kNesterov };

// Scalars of one step; fields of other rules are not read.
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

// [Note: random bits] bfloat16 states are rounded stochastically: 16 random bits r are added to the float32's bits and
// the lower half is cut off, so the mean over r is the value. A NaN becomes 0x7fc0, infinities stay, and values above
// the largest bfloat16 may become infinite. A bfloat16 parameter without master is rounded in the same way. Two
// neighbours share a 32-bit hash; element e = first + i of a range with key (a, b, first) has
//
//   x = uint32(e >> 1) + a + d         d = 0 for momentum, 0x9e3779b9 for variance, 0x3c6ef372 for the parameter
//   x = (x ^ x >> 16) * 0x21f0aaad
//   x = ((x ^ x >> 15) + b) * 0xd35a2d97
//   x = x ^ x >> 15                    r = x & 0xffff for even e, x >> 16 for odd e
//
// The hash is of hash-prospector (C. Wellons 2018, "Prospecting for Hash Functions"; constants by TheIronBorn, its
// issue 19). Rounding needs uniform bits without correlation to values, neighbours or other steps; it needs no
// cryptographic generator. The start of the counter, a + d, separates steps, parameters and roundings; b alone would
// leave their bits alike. Elements 2^33 apart share their bits.
//
// With one key per step and parameter, and `first` counted from the parameter's first element, results do not depend on
// placement or on the division into ranges.
struct RandomKey {
  uint32_t a = 0;
  uint32_t b = 0;
  int64_t first = 0;
};

// The rounded quantity, as its counter offset d: multiples of 2^32 / the golden ratio.
enum class Rounded : uint32_t { kMomentum = 0, kVariance = 0x9e3779b9u, kParam = 0x3c6ef372u };

// The finalizer of SplitMix64 (Steele, Lea & Flood 2014, "Fast splittable pseudorandom number generators").
constexpr uint64_t mix_key(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}
// `first`: the range's first element, counted in the parameter.
constexpr RandomKey random_key(uint64_t seed, int64_t step, int64_t param, int64_t first) {
  constexpr uint64_t kGoldenRatio = 0x9e3779b97f4a7c15u;
  uint64_t x = mix_key(seed + kGoldenRatio);
  x = mix_key(x + kGoldenRatio * static_cast<uint64_t>(step + 1));
  x = mix_key(x + kGoldenRatio * static_cast<uint64_t>(param + 1));
  return {static_cast<uint32_t>(x), static_cast<uint32_t>(x >> 32), first};
}

// One contiguous range of elements. `param` may equal `grad` if their element sizes are equal; the new parameter then
// replaces the gradient. `param` may be null. With `new_*` (all states or none, apart from everything else) the old
// states stay unchanged.
//
// With lower halves or no master, `param` is read too. It is then bfloat16, apart from `grad` and never null, states
// are updated in place, and only `RuleKernels::step` accepts the range.
//
// 8-bit states have scales, from the range's first block on. The range begins with a block. Its last block may be
// shorter: elements behind its end are neither read nor written and do not affect the scale.
struct AdamRange {
  void* master;      // [numel] of `master_type`; null for kNone
  void* momentum;    // [numel] of `momentum_type`
  void* variance;    // [numel] of `variance_type`
  const void* grad;  // [numel] of `grad_dtype`
  void* param;       // [numel] of `param_dtype`
  DType grad_dtype;
  DType param_dtype;
  int64_t numel;
  float* new_master = nullptr;                    // [numel]; for updates into new states alone
  void* new_momentum = nullptr;                   // [numel] of `momentum_type`
  void* new_variance = nullptr;                   // [numel] of `variance_type`
  StateType master_type = StateType::kFloat32;    // or kLowerHalf, or kNone: only `param` exists
  StateType momentum_type = StateType::kFloat32;  // or kBFloat16, kSigned8
  StateType variance_type = StateType::kFloat32;  // or kBFloat16, kUnsigned8; kNone without a variance
  float* momentum_scales = nullptr;               // [ceil(numel / kStateBlock)], 8-bit moments only, as the next three
  float* variance_scales = nullptr;
  float* new_momentum_scales = nullptr;
  float* new_variance_scales = nullptr;
  RandomKey key = {};
};

// The passes of one update rule.
template <typename Scalars>
struct RuleKernels {
  void (*step)(const AdamRange& range, const Scalars& scalars);
  // Stores only `param`, with the bits of `step`; `param` must be apart from all other arrays.
  void (*param)(const AdamRange& range, const Scalars& scalars);
  // [Note: scale-independent values], at most kScaleDependentPiece elements: stores the parameters that are equal for
  // each grad_scale from that of `scalars` to `most_grad_scale`, and lists the others in `dependent`. `grad` and
  // `param` have the same 16-bit dtype.
  void (*param_between)(const AdamRange& range, const Scalars& scalars, float most_grad_scale,
                        ScaleDependentValues* dependent);
  // The values in `dependent`, with the known scale.
  void (*param_scale_dependent)(const AdamRange& range, const Scalars& scalars, const ScaleDependentValues& dependent);
};

// The functions of one ISA, constant tables. Obtained from cpu_kernels() or cpu_kernels_named().
struct CpuKernels {
  const char* isa;
  RuleKernels<AdamScalars> adam;
  RuleKernels<MomentumScalars> momentum;  // for each MomentumRule; the variance is null and of type kNone
  // [Note: values in place], at most kScaleDependentPiece elements of a split master: replaces the parameters that are
  // equal for each grad_scale from that of `scalars` to `most_grad_scale`, and lists the others in `dependent`. If
  // `dependent` overflows (kAll), nothing is changed.
  void (*adam_put_values)(const AdamRange& range, const AdamScalars& scalars, float most_grad_scale,
                          ScaleDependentValues* dependent);
  // The values in `dependent`, with the known scale; with kAll the whole update.
  void (*adam_put_scale_dependent_values)(const AdamRange& range, const AdamScalars& scalars,
                                          const ScaleDependentValues& dependent);
  // Then the states, unless `dependent` is kAll. `least_grad_scale` is that of adam_put_values. Returns the number of
  // elements whose new parameter differs from the one in place: 0, unless memory was changed in between.
  int64_t (*adam_put_states)(const AdamRange& range, const AdamScalars& scalars, float least_grad_scale,
                             const ScaleDependentValues& dependent);
  // Instead of the last two: restores `param` as it was before adam_put_values with these `scalars`.
  void (*adam_take_values_back)(const AdamRange& range, const AdamScalars& scalars,
                                const ScaleDependentValues& dependent);
  // [Note: split masters]: splits all masters except NaNs without loss; keeps |variance[i]|. `variance` is null if it
  // is not float32.
  void (*split_master)(const float* master, uint16_t* param, uint16_t* lower, float* variance, int64_t numel);
  // The inverse of split_master.
  void (*join_master)(const uint16_t* param, const uint16_t* lower, const float* variance, float* master,
                      int64_t numel);
  // out[i] = round(in[i])
  void (*cast_from_float)(const float* in, void* out, DType out_dtype, int64_t numel);
  // out[i] = float(in[i])
  void (*cast_to_float)(const void* in, DType in_dtype, float* out, int64_t numel);
  // sum[i] = round(float(sum[i]) + float(x[i])), both of `dtype`; as torch's add
  void (*add)(void* sum, const void* x, DType dtype, int64_t numel);
  // sum[i] = sum[i] + float(x[i])
  void (*add_to_float)(float* sum, const void* x, DType x_dtype, int64_t numel);
  // partials[b] for every block b of x: [Note: one order of summation]
  void (*sum_squares)(const void* x, DType dtype, int64_t numel, double* partials);
  // A state of `type` (not kLowerHalf) to float32 as adam reads it, and back as adam stores a momentum. `scales` is
  // null except for 8-bit states.
  void (*expand_state)(StateType type, const void* data, const float* scales, float* out, int64_t numel);
  void (*compress_state)(const float* in, StateType type, void* out, float* scales, int64_t numel,
                         const RandomKey& key);
};

// The table of chosen_isa() (common/isa.h).
const CpuKernels& cpu_kernels();

// The table of `isa`; null if it is unknown or not supported by this processor.
const CpuKernels* cpu_kernels_named(const char* isa);

}  // namespace patrickstar::optim
