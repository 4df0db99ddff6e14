// The mean over ranks on CUDA, with the same bits as rank_mean.h. Device pointers; enqueued on `stream`, returns at
// once. The caller selects the device. A failed launch throws SystemError.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/dtype.h"

namespace patrickstar::cuda {

void mean_of_ranks(const void* shards, int num_ranks, void* out, DType dtype, int64_t numel, cudaStream_t stream);

}  // namespace patrickstar::cuda
