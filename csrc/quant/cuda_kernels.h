// Dequantisation on CUDA, with the bits of kernels.h. Pointers are device pointers; calls enqueue on `stream` and
// return. The caller selects the device. A failed launch throws SystemError.
#pragma once

#include <cuda_runtime_api.h>

#include "quant/kernels.h"

namespace patrickstar::quant::cuda {

void dequantize(const QuantizedPart& from, void* out, DType dtype, cudaStream_t stream);

}  // namespace patrickstar::quant::cuda
