// Bytes that chunks and their transit buffers take on each tier. Pure functions of sizes.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "chunk/layout.h"
#include "common/types.h"
#include "plan/planner.h"

namespace patrickstar {

// Bytes of a chunk's optimizer states; and of everything it keeps on its resting tier, which adds the compute copy (or
// the gradient in its place).
int64_t optimizer_bytes(const ChunkSpec& chunk);
int64_t resting_tier_bytes(const ChunkSpec& chunk);
// Bytes on the tier of its states, gradients aside: states; the compute value where it is part of the master; codes and
// scales of a quantised chunk.
int64_t placed_bytes(const ChunkSpec& chunk);

enum class Backwards : uint8_t {
  kOne,      // one, or unknown
  kSeveral,  // gradients accumulate
};

// Extra bytes of gradient accumulation, in whole pages: the float32 sum, and a gradient that cannot take its
// parameters' place because another forward follows. 0 for a frozen chunk.
int64_t accumulation_bytes(const Layout& layout, ChunkId chunk);
// resting_tier_bytes() plus accumulation_bytes() where `backwards` is kSeveral.
int64_t held_bytes(const Layout& layout, ChunkId chunk, Backwards backwards);

// Host memory kept free beside the chunks: one gradient whose parameters are still in use, and page rounding. Two
// gradients where gradients have no fixed place: one downloads while another is applied.
int64_t spare_bytes(const Layout& layout);

// Disk bytes of a chunk's optimizer states. bytes_beside_disk(): what stays on the host then, which is the value or the
// gradient, and both where the value is part of the master (engine/disk_states.h).
int64_t disk_bytes(const ChunkSpec& chunk);
int64_t bytes_beside_disk(const Layout& layout, ChunkId chunk, Backwards backwards);

// Host buffers through which disk states pass. Each of the `count` sets fits any chunk on the disk.
struct DiskSets {
  int count = 0;
  std::array<int64_t, 3> block_bytes{};  // per set, by optimizer_arrays(); 0: no such state

  // Grows the sets so that they fit `chunk`.
  void serve(const ChunkSpec& chunk);
  // All sets, in whole pages.
  int64_t num_bytes() const;
};
// One is being read, one updated, one written.
constexpr int kNumDiskSets = 3;
DiskSets disk_sets(const Layout& layout, const std::vector<Tier>& resting_tiers);

// Host memory that speculative updates leave to downloading gradients, in largest gradients. Not measured.
constexpr int kNumReservedGradients = 4;
int64_t reserved_gradient_bytes(const Layout& layout);

// Least host memory with which an update can start before the norm: new compute values, or for in-place values the log
// of scale-dependent ones.
int64_t least_new_bytes(const Layout& layout, ChunkId chunk);

// A GPU round-trip update (engine/round_trips.h) moves pieces of kRoundTripPiece elements; kNumRoundTripBuffers pieces
// are in flight. Pieces of 128 MiB and twice as many in flight gained nothing (docs/log.md).
constexpr int64_t kRoundTripPiece = int64_t{1} << 24;
constexpr int kNumRoundTripBuffers = 4;
constexpr int64_t kRoundTripAlignment = 256;  // of each array in a piece
// Device bytes of one piece with its compute value, and of all pieces in flight; 0 where no chunk has states.
int64_t round_trip_piece_bytes(const Layout& layout);
int64_t round_trip_bytes(const Layout& layout);

std::vector<RoundTripCost> round_trip_costs(const Layout& layout);

}  // namespace patrickstar
