// Properties of a step that its plan does not have: compute times, and how chunks are updated. Any thread.
#pragma once

#include <cstdint>
#include <vector>

#include "chunk/layout.h"
#include "common/timeline.h"
#include "plan/recipe.h"

namespace patrickstar {

struct StepShape {
  std::vector<double> compute_seconds;          // by access: device work until the next one, waits excluded
  std::vector<Recipe> updates;                  // by chunk
  std::vector<int64_t> numels;                  // by chunk: elements that this rank updates
  int num_ranks = 1;                            // ranks that share chunks
  std::vector<ActivationCopies> activations{};  // by access; empty: none leave
  std::vector<int64_t> disk_bytes{};            // by chunk: states on the disk; 0 elsewhere
  // By chunk: bytes read and written to dequantise it; empty: no time, or contained in compute_seconds.
  std::vector<int64_t> dequantized_bytes{};
  std::vector<int> chunk_ranks{};  // by chunk: ranks that share it; empty: num_ranks

  int ranks_of(ChunkId chunk) const {
    return chunk_ranks.empty() ? num_ranks : chunk_ranks[static_cast<size_t>(chunk)];
  }
  bool is_sharded(ChunkId chunk) const { return ranks_of(chunk) > 1; }
};

// Sets num_ranks, numels, disk_bytes and chunk_ranks from a layout.
void describe_updates(const Layout& layout, StepShape& shape);

}  // namespace patrickstar
