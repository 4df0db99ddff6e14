// Parameters that are updated as whole matrices (optim/matrix_rule.h), and their scratch memory. The scratch memory
// holds the largest matrix in float32. On the device it is allocated per update, on the host once per queue of updates.
//
// Matrices are the trained parameters with two dimensions. All others follow their group's rule element by element, in
// the same chunks. Guarded by the engine's lock.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "engine/chunk_memory.h"
#include "engine/group_options.h"
#include "optim/matrix_rule.h"

namespace patrickstar {

class MatrixUpdates {
 public:
  // `rule`: null for none. `shapes`: by parameter, in memory order. Throws ArgumentError if ranks split a matrix, or if
  // its master or momentum is not float32. Throws MemoryBudgetError if the host has no room for scratch memory.
  MatrixUpdates(ChunkMemory& memory, std::shared_ptr<const optim::MatrixRule> rule,
                const std::vector<std::vector<int64_t>>& shapes, Tier lowest);

  bool has(ParamId param) const { return rule_ != nullptr && shapes_[static_cast<size_t>(param)].size() == 2; }
  bool has_any(ChunkId chunk) const;
  bool is_empty() const { return largest_numel_ == 0; }
  // Bytes of scratch memory for an update of the chunk; 0 without matrices.
  int64_t scratch_bytes(ChunkId chunk) const { return has_any(chunk) ? largest_numel_ * 4 : 0; }
  // Scratch memory on the host, for chunks whose states are on tier `states`; null without matrices.
  void* host_scratch(Tier states);
  optim::MatrixScalars scalars(ParamId param, const GroupOptions& options, float grad_scale, void* scratch) const;

 private:
  void check(ParamId param) const;

  ChunkMemory& memory_;
  const std::shared_ptr<const optim::MatrixRule> rule_;
  const std::vector<std::vector<int64_t>>& shapes_;
  int64_t largest_numel_ = 0;
  std::vector<HostBuffer> scratch_;  // of the host's queue and, if there is a disk, of the disk's queue
};

}  // namespace patrickstar
