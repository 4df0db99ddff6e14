// A kernel that keeps a stream busy for `nanoseconds`, for runs with delays (backend/delaying_backend.h).
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace patrickstar {

cudaError_t launch_delay(int64_t nanoseconds, cudaStream_t stream);

}  // namespace patrickstar
