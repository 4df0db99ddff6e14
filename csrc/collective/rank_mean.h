// The mean over ranks on the host: [Note: order of ranks] in communicator.h.
//
// A NaN that comes out is the canonical one ([Note: one order of operations] in optim/kernels.h). Any thread, on
// disjoint ranges; nothing is allocated. The CUDA twin (cuda_rank_mean.h) gives the same bits.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace patrickstar {

// out[i] = round((((x0[i] + x1[i]) + x2[i]) ...) * (1 / num_ranks)), where x_r is the r-th of num_ranks ranges of
// `numel` elements that lie end to end in `shards`. `out` may be one of these ranges.
void mean_of_ranks(const void* shards, int num_ranks, void* out, DType dtype, int64_t numel);

}  // namespace patrickstar
