// A step beside its plan: how long its moments compute, and how its chunks are updated. A value; any thread.
#pragma once

#include <cstdint>
#include <vector>

#include "chunk/layout.h"
#include "common/timeline.h"
#include "plan/recipe.h"

namespace patrickstar {

struct StepShape {
  std::vector<double> compute_seconds;          // by moment: device work until the next one begins, without waiting
  std::vector<Recipe> updates;                  // by chunk
  std::vector<int64_t> numels;                  // by chunk: what this rank updates
  int num_ranks = 1;                            // that share chunks
  std::vector<ActivationCopies> activations{};  // by moment; empty: none leave
  std::vector<int64_t> disk_bytes{};            // by chunk: what its states take on the disk, where they are there
  // By chunk: read and written on the device to dequantise it; empty: that takes no time, or moments' times hold it.
  std::vector<int64_t> dequantized_bytes{};
  std::vector<int> chunk_ranks{};  // by chunk: of the ranks, that share it; empty: all share each

  int ranks_of(ChunkId chunk) const {
    return chunk_ranks.empty() ? num_ranks : chunk_ranks[static_cast<size_t>(chunk)];
  }
  bool is_sharded(ChunkId chunk) const { return ranks_of(chunk) > 1; }
};

// Fills what of `shape` follows from a layout: ranks that share a chunk, and by chunk the elements of an update and its
// bytes on the disk.
void describe_updates(const Layout& layout, StepShape& shape);

}  // namespace patrickstar
