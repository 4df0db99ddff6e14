// Turns CUDA error codes into SystemError.
#pragma once

#include <cuda_runtime_api.h>

#include "common/check.h"

#define PS_CUDA_CHECK(call)                                                   \
  do {                                                                        \
    const cudaError_t ps_cuda_error = (call);                                 \
    PS_CHECK(ps_cuda_error == cudaSuccess, ::patrickstar::SystemError, #call, \
             " failed: ", cudaGetErrorString(ps_cuda_error));                 \
  } while (false)
