// The process's PyTorch, once its shim is attached.
#pragma once

#include <functional>
#include <string>

#include "torch_api/torch_api.h"

namespace patrickstar {

// Loads the shim at `path`. Throws SystemError if it cannot be loaded, StateError if its interface differs or another
// one is attached.
void attach_torch(const std::string& path);

// Called at the first use of PyTorch if none is attached; it must call attach_torch().
void set_torch_loader(std::function<void()> loader);

// Null before attach_torch().
const TorchApi* attached_torch();

// Throws StateError if PyTorch cannot be attached.
const TorchApi& torch_api();
// Throws StateError if the attached PyTorch has no CUDA.
const CudaApi& cuda_api();

}  // namespace patrickstar
