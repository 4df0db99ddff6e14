#pragma once

#include <cstdint>
#include <vector>

#include "common/dtype.h"

namespace patrickstar::optim {

// A number format of the model's computation (FP8 for example). The parameter on the device, round(master), passes
// through it whenever it is made there: uploaded, cast from a master, all-gathered, updated, or written by the user
// (ChunkMemory::present). Masters, updates and host memory never see formatted values, and no value is formatted twice.
// The input is the whole parameter, also with sharded chunks, so a format may use one scale per tensor. The bits depend
// on master and shape only.
class ComputeFormat {
 public:
  virtual ~ComputeFormat() = default;
  // Rounds the values in place; on CUDA, enqueues this on the current stream. `shape` is in memory order, slowest
  // dimension first.
  virtual void round(const std::vector<int64_t>& shape, DType dtype, void* values) const = 0;
};

}  // namespace patrickstar::optim
