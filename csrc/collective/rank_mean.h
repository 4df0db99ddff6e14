// The mean over ranks on the host ([Note: order of ranks]). Any thread, on disjoint ranges; allocates nothing.
// cuda_rank_mean.h gives the same bits. A resulting NaN is canonical ([Note: one order of operations]).
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace patrickstar {

// out[i] = round((((x0[i] + x1[i]) + x2[i]) ...) * (1 / num_ranks)). x_r is the r-th of num_ranks consecutive ranges of
// `numel` elements in `shards`. `out` may be one of these ranges.
void mean_of_ranks(const void* shards, int num_ranks, void* out, DType dtype, int64_t numel);

}  // namespace patrickstar
