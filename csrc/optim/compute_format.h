// The number format in which modules compute.
#pragma once

#include <cstdint>
#include <vector>

#include "common/dtype.h"

namespace patrickstar::optim {

// [Note: compute formats] The compute value of a trained parameter, round(master), passes through the format whenever
// it is made on the device: uploaded, cast from a master there, gathered from the ranks, updated, or written in use
// (ChunkMemory::present). Masters, updates and host memory never see what the format makes of it, and a formatted value
// is never formatted again. It is all of the parameter, also where ranks hold shards, so a format may have a scale for
// each tensor. Bits depend on master and shape alone.
class ComputeFormat {
 public:
  virtual ~ComputeFormat() = default;
  // Rounds the values in place; on a CUDA device it enqueues this on the current stream. `shape` is that of the memory,
  // slowest dimension first.
  virtual void round(const std::vector<int64_t>& shape, DType dtype, void* values) const = 0;
};

}  // namespace patrickstar::optim
