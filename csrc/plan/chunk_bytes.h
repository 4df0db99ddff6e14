// What chunks take of each tier, and what passes through it beside them. Pure functions of sizes.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "chunk/layout.h"
#include "common/types.h"
#include "plan/planner.h"

namespace patrickstar {

// Bytes of a chunk's optimizer states, and of everything it takes where its states are (states plus the compute
// copy or the gradient in its place).
int64_t optimizer_bytes(const ChunkSpec& chunk);
int64_t home_bytes(const ChunkSpec& chunk);
// What its states take where they are placed, whatever becomes of gradients: the compute value as well where it is a
// part of the master, and of a quantised chunk its codes and scales.
int64_t placed_bytes(const ChunkSpec& chunk);

// How many backwards a step is known to have.
enum class Backwards : uint8_t {
  kOne,      // or not known
  kSeveral,  // whose gradients accumulate
};

// What accumulation takes beside a chunk's home, where that is: sums of gradients in float32, and a gradient beside the
// parameters, whose place it cannot take while another forward is to come, in whole pages. None for a frozen chunk.
int64_t accumulation_bytes(const Layout& layout, ChunkId chunk);
// Both: all that a chunk takes where it is at home.
int64_t held_bytes(const Layout& layout, ChunkId chunk, Backwards backwards);

// What the host keeps free beside its chunks: for a gradient whose parameters are still of use, and pages that are not
// full. Where gradients never take their parameters' place, for two: one that comes down while another is applied.
int64_t spare_bytes(const Layout& layout);

// What a chunk's optimizer states take on a disk, and what is left of it on the host where they are there: its value or
// its gradient, both where the value is a part of the master ([Note: states on the disk], engine/disk_states.h).
int64_t disk_bytes(const ChunkSpec& chunk);
int64_t bytes_beside_disk(const Layout& layout, ChunkId chunk, Backwards backwards);

// Host memory through which the states of chunks on the disk pass: sets of blocks, each for any of these chunks.
struct DiskSets {
  int count = 0;
  std::array<int64_t, 3> block_bytes{};  // of each set, for each of optimizer_arrays(); 0: no chunk has such a state

  // For this chunk as well.
  void serve(const ChunkSpec& chunk);
  // Of all of them, in whole pages.
  int64_t num_bytes() const;
};
// One is read, one is updated, one is written.
constexpr int kNumDiskSets = 3;
DiskSets disk_sets(const Layout& layout, const std::vector<Tier>& homes);

// Of host memory, what updates ahead of the step leave to gradients that come down: a few chunks' of the largest ones.
constexpr int kNumReservedGradients = 4;
int64_t reserved_gradient_bytes(const Layout& layout);

// What an update on the host takes at least to begin ahead of the step: its new compute values, or what is left open of
// them where they take the old ones' place.
int64_t least_new_bytes(const Layout& layout, ChunkId chunk);

// [Note: visits] (engine/visits.h): chunks go through the device in pieces of so many elements, so many at once.
constexpr int64_t kVisitingPiece = int64_t{1} << 24;
constexpr int kNumVisitors = 4;
constexpr int64_t kVisitorAlignment = 256;  // of each array in it
// Of the device, what one of these takes, with its value, and what all of them do; 0: no chunk has states.
int64_t visiting_piece_bytes(const Layout& layout);
int64_t visitor_bytes(const Layout& layout);

std::vector<VisitCost> visit_costs(const Layout& layout);

}  // namespace patrickstar
