// Dequantisation on a CUDA device: same bits as kernels.h. Pointers are device pointers; calls enqueue on `stream` and
// return; a failed launch throws SystemError. The caller selects the device.
#pragma once

#include <cuda_runtime_api.h>

#include "quant/kernels.h"

namespace patrickstar::quant::cuda {

void dequantize(const QuantizedPart& from, void* out, DType dtype, cudaStream_t stream);

}  // namespace patrickstar::quant::cuda
