#include "collective/rank_mean.h"

#include <algorithm>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace patrickstar {

namespace {

#include "common/elements.inl"

// Sums of a block stay in the L1 cache; the loops are simple enough for the compiler to vectorise.
constexpr int64_t kBlock = 1024;

template <DType kType>
float to_float(typename Storage<kType>::Element x) {
  if constexpr (kType == DType::kFloat32) {
    return x;
  } else if constexpr (kType == DType::kBFloat16) {
    return float_of(static_cast<uint32_t>(x) << 16);
  } else {
    return float_from_f16(x);
  }
}

template <DType kType>
typename Storage<kType>::Element from_float(float x) {
  const float quiet = x == x ? x : float_of(0x7fc00000u);
  if constexpr (kType == DType::kFloat32) {
    return quiet;
  } else if constexpr (kType == DType::kBFloat16) {
    return bf16_from_float(quiet);
  } else {
    return f16_from_float(quiet);
  }
}

template <DType kType>
__attribute__((noinline)) void mean_loop(const void* shards, int num_ranks, void* out, int64_t numel) {
  using Element = typename Storage<kType>::Element;
  const auto* first = static_cast<const Element*>(shards);
  auto* means = static_cast<Element*>(out);
  const float factor = 1.0f / static_cast<float>(num_ranks);
  float sums[kBlock];
  for (int64_t begin = 0; begin < numel; begin += kBlock) {
    const int64_t size = std::min(kBlock, numel - begin);
    for (int64_t i = 0; i < size; ++i) sums[i] = to_float<kType>(first[begin + i]);
    for (int rank = 1; rank < num_ranks; ++rank) {
      const Element* x = first + rank * numel + begin;
      for (int64_t i = 0; i < size; ++i) sums[i] = sums[i] + to_float<kType>(x[i]);
    }
    for (int64_t i = 0; i < size; ++i) means[begin + i] = from_float<kType>(sums[i] * factor);
  }
}

}  // namespace

void mean_of_ranks(const void* shards, int num_ranks, void* out, DType dtype, int64_t numel) {
  with_ieee_arithmetic(
      [&] { with_dtype(dtype, [&](auto type) { mean_loop<decltype(type)::value>(shards, num_ranks, out, numel); }); });
}

}  // namespace patrickstar
