// The mean over ranks: each thread sums 16 bytes of every rank's shard in rank order. Torch-free.
#include "collective/cuda_rank_mean.h"
#include "common/cuda_elementwise.h"

namespace patrickstar::cuda {

namespace {

// A thread loads its elements of all ranks before it stores, so `out` may be one of the shards.
template <DType kType>
struct MeanBody {
  const void* shards;
  void* out;
  int64_t numel;
  int num_ranks;
  float factor;

  template <int kCount>
  __device__ void run(int64_t i) const {
    float sums[kCount], x[kCount];
    load<kType>(shards, i, sums);
    for (int rank = 1; rank < num_ranks; ++rank) {
      load<kType>(shards, rank * numel + i, x);
#pragma unroll
      for (int k = 0; k < kCount; ++k) sums[k] = __fadd_rn(sums[k], x[k]);
    }
#pragma unroll
    for (int k = 0; k < kCount; ++k) sums[k] = quiet(__fmul_rn(sums[k], factor));
    store<kType>(out, i, sums);
  }
};

}  // namespace

void mean_of_ranks(const void* shards, int num_ranks, void* out, DType dtype, int64_t numel, cudaStream_t stream) {
  const float factor = 1.0f / static_cast<float>(num_ranks);
  // Every rank's shard must start on 16 bytes.
  const bool aligned = is_aligned(shards, 16) && is_aligned(out, 16) && numel * element_size(dtype) % 16 == 0;
  with_dtype(dtype, [&](auto type) {
    constexpr DType kType = decltype(type)::value;
    constexpr int kPack = static_cast<int>(16 / sizeof(typename Storage<kType>::Element));
    launch<kPack>("mean_of_ranks", MeanBody<kType>{shards, out, numel, num_ranks, factor}, aligned, numel, stream);
  });
}

}  // namespace patrickstar::cuda
