// Updates with states of fewer bytes on CUDA, and these states by themselves. Torch-free.
#include "optim/cuda_blocks.h"
#include "optim/cuda_kernels.h"
#include "optim/cuda_steps.h"

namespace patrickstar::optim::cuda {

namespace {

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

// Calls launch(std::bool_constant<true if the map is signed>()).
template <class Launch>
void with_sign(StateType type, const Launch& launch) {
  if (type == StateType::kSigned8) return launch(std::true_type());
  launch(std::false_type());
}

}  // namespace

void adam_by_blocks(const AdamRange& range, const AdamScalars& scalars, cudaStream_t stream) {
  update_by_blocks("adam", range, scalars, stream);
}

void momentum_step(const AdamRange& range, const MomentumScalars& scalars, cudaStream_t stream) {
  update_by_blocks("momentum_step", range, scalars, stream);
}

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
