// Which parameters of an engine are updated as whole matrices ([Note: whole matrices], optim/matrix_rule.h), and the
// memory that this takes: float32 of the largest of them, on the device for each update there, and on the host from the
// beginning on, for each queue of updates.
//
// Matrices are the trained parameters of two dimensions. All others follow their group's rule element by element, in
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
  // `rule`: null for none; `shapes` of parameters by id, as they lie in memory. Throws ArgumentError where a matrix is
  // cut between ranks, or has another master or momentum than float32, and MemoryBudgetError where the host has no room
  // for the memory.
  MatrixUpdates(ChunkMemory& memory, std::shared_ptr<const optim::MatrixRule> rule,
                const std::vector<std::vector<int64_t>>& shapes, Tier lowest);

  bool has(ParamId param) const { return rule_ != nullptr && shapes_[static_cast<size_t>(param)].size() == 2; }
  bool has_any(ChunkId chunk) const;
  bool is_empty() const { return largest_numel_ == 0; }
  // Bytes of memory for updates of the chunk; 0 where it has no matrices.
  int64_t scratch_bytes(ChunkId chunk) const { return has_any(chunk) ? largest_numel_ * 4 : 0; }
  // Host memory of that kind, for updates of chunks with their states on `states`; null where there are no matrices.
  void* host_scratch(Tier states);
  optim::MatrixScalars scalars(ParamId param, const GroupOptions& options, float grad_scale, void* scratch) const;

 private:
  void check(ParamId param) const;

  ChunkMemory& memory_;
  const std::shared_ptr<const optim::MatrixRule> rule_;
  const std::vector<std::vector<int64_t>>& shapes_;
  int64_t largest_numel_ = 0;
  std::vector<HostBlock> scratch_;  // of the host's queue and, where states may be on the disk, of that one's
};

}  // namespace patrickstar
