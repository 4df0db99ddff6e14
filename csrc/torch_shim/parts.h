// Parts of a shim that not every PyTorch has.
#pragma once

#include "torch_api/torch_api.h"

namespace patrickstar::shim {

// See TorchApi.
TorchGroup* open_group(const char* name);
const CudaApi* cuda_api();

}  // namespace patrickstar::shim
