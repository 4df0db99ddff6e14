#include "plan/resting_tiers.h"

#include <algorithm>
#include <functional>
#include <set>
#include <utility>

#include "common/ablation.h"
#include "memory/host_arena.h"

namespace patrickstar {

namespace {

// Moves states to the disk, last chunk first, skipping chunks with more than `most_bytes` of states. Stops when the
// rest fits the host or the disk is full.
InitialPlacement with_disk(const Layout& layout, int64_t host_limit_bytes, int64_t disk_limit_bytes,
                           Backwards backwards, int64_t most_bytes, InitialPlacement placement) {
  DiskSets sets;
  int64_t beside_sets = placement.host_bytes;
  for (ChunkId chunk = layout.num_chunks() - 1; chunk >= 0 && placement.host_bytes > host_limit_bytes; --chunk) {
    const int64_t bytes = disk_bytes(layout.chunk(chunk));
    if (bytes == 0 || bytes > most_bytes || placement.disk_bytes + bytes > disk_limit_bytes) continue;
    placement.resting_tiers[static_cast<size_t>(chunk)] = Tier::kDisk;
    placement.disk_bytes += bytes;
    sets.serve(layout.chunk(chunk));
    beside_sets += bytes_beside_disk(layout, chunk, backwards) - held_bytes(layout, chunk, backwards);
    placement.host_bytes = beside_sets + sets.num_bytes();
  }
  return placement;
}

// Buffer sets are as large as the largest chunk on the disk, so a few large chunks may cost more host memory than they
// free. Tries each size limit. The best placement fits the host with the fewest disk bytes, or misses the host limit by
// least.
void place_on_disk(const Layout& layout, int64_t host_limit_bytes, int64_t disk_limit_bytes, Backwards backwards,
                   InitialPlacement& placement) {
  std::set<int64_t, std::greater<>> sizes;
  for (const ChunkSpec& chunk : layout.chunks()) {
    if (chunk.trainable) sizes.insert(disk_bytes(chunk));
  }
  const auto rank = [&](const InitialPlacement& found) {
    const int64_t missing = std::max<int64_t>(found.host_bytes - host_limit_bytes, 0);
    return std::make_pair(missing, found.disk_bytes);
  };
  InitialPlacement best = placement;
  for (int64_t most_bytes : sizes) {
    InitialPlacement found = with_disk(layout, host_limit_bytes, disk_limit_bytes, backwards, most_bytes, placement);
    if (rank(found) < rank(best)) best = std::move(found);
  }
  placement = std::move(best);
}

// `next`, or if `next` has more than `missing_bytes`, the smallest host chunk that still has `missing_bytes`.
ChunkId least_enough(const Layout& layout, const std::vector<Tier>& resting_tiers, ChunkId next, int64_t missing_bytes,
                     Backwards backwards) {
  ChunkId least = next;
  for (ChunkId chunk = next + 1; chunk < layout.num_chunks(); ++chunk) {
    const int64_t bytes = held_bytes(layout, chunk, backwards);
    const bool is_on_host = resting_tiers[static_cast<size_t>(chunk)] == Tier::kHost;
    if (is_on_host && bytes >= missing_bytes && bytes < held_bytes(layout, least, backwards)) least = chunk;
  }
  return least;
}

void move_to_device(const Layout& layout, ChunkId chunk, Backwards backwards, InitialPlacement& placement) {
  placement.resting_tiers[static_cast<size_t>(chunk)] = Tier::kDevice;
  placement.host_bytes -= held_bytes(layout, chunk, backwards);
}

// Where gradients on the host last only until their update, backward runs no faster than host updates. Host updates
// then need work throughout backward, so device chunks alternate with host chunks, in proportion to bytes. Otherwise
// the first chunks go to the device, so that updates of the others overlap the beginning of the next forward. Returns
// the device room left.
int64_t spread_over_device(const Layout& layout, int64_t host_limit_bytes, int64_t room, Backwards backwards,
                           InitialPlacement& placement) {
  int64_t on_host = 0;
  for (ChunkId chunk = 0; chunk < layout.num_chunks(); ++chunk) {
    const bool moves = placement.resting_tiers[static_cast<size_t>(chunk)] == Tier::kHost;
    on_host += moves ? held_bytes(layout, chunk, backwards) : 0;
  }
  const int64_t excess = placement.host_bytes - host_limit_bytes;
  const double ratio = on_host == 0 ? 0 : static_cast<double>(excess) / static_cast<double>(on_host);
  double due = 0;
  for (ChunkId chunk = 0; chunk < layout.num_chunks() && placement.host_bytes > host_limit_bytes; ++chunk) {
    if (placement.resting_tiers[static_cast<size_t>(chunk)] != Tier::kHost) continue;
    const int64_t bytes = held_bytes(layout, chunk, backwards);
    due += ratio * static_cast<double>(bytes);
    if (due <= 0 || bytes > room) continue;
    due -= static_cast<double>(bytes);
    room -= bytes;
    move_to_device(layout, chunk, backwards, placement);
  }
  return room;
}

}  // namespace

bool any_gradient_passes(const Layout& layout) {
  const std::vector<ChunkSpec>& chunks = layout.chunks();
  return std::any_of(chunks.begin(), chunks.end(),
                     [](const ChunkSpec& chunk) { return chunk.rows.gradient().on_host == ArrayMemory::kPassing; });
}

std::vector<ChunkId> chunks_leaving_disk(const Layout& layout, const std::vector<Tier>& resting_tiers,
                                         int64_t room_bytes) {
  std::vector<ChunkId> chunks;
  for (ChunkId chunk = 0; chunk < layout.num_chunks(); ++chunk) {
    const int64_t bytes = optimizer_bytes(layout.chunk(chunk)) + HostArena::most_rounding_bytes(0);
    if (resting_tiers[static_cast<size_t>(chunk)] != Tier::kDisk || bytes > room_bytes) continue;
    chunks.push_back(chunk);
    room_bytes -= bytes;
  }
  return chunks;
}

InitialPlacement initial_placement(const Layout& layout, int64_t host_limit_bytes, int64_t device_room_bytes,
                                   Backwards backwards, int64_t disk_limit_bytes) {
  InitialPlacement result;
  result.resting_tiers.assign(layout.chunks().size(), Tier::kHost);
  result.host_bytes = spare_bytes(layout) + bytes_on_host(layout, result.resting_tiers, backwards);
  if (disk_limit_bytes > 0) place_on_disk(layout, host_limit_bytes, disk_limit_bytes, backwards, result);
  int64_t room = device_room_bytes;
  const bool in_turn = any_gradient_passes(layout) && !is_left_out(Mechanism::kRestingTiersInTurn);
  if (in_turn) room = spread_over_device(layout, host_limit_bytes, room, backwards, result);
  for (ChunkId next = 0; next < layout.num_chunks() && result.host_bytes > host_limit_bytes; ++next) {
    const ChunkId chunk =
        least_enough(layout, result.resting_tiers, next, result.host_bytes - host_limit_bytes, backwards);
    const int64_t bytes = held_bytes(layout, chunk, backwards);
    if (bytes > room || result.resting_tiers[static_cast<size_t>(chunk)] != Tier::kHost) continue;
    move_to_device(layout, chunk, backwards, result);
    room -= bytes;
  }
  // Frozen values are written on the host first.
  bool needs_spare = false;
  for (ChunkId chunk = 0; chunk < layout.num_chunks(); ++chunk) {
    const bool is_on_host = result.resting_tiers[static_cast<size_t>(chunk)] != Tier::kDevice;
    needs_spare = needs_spare || is_on_host || !layout.chunk(chunk).trainable;
  }
  if (!needs_spare) result.host_bytes = 0;
  return result;
}

std::vector<Tier> later_resting_tiers(const Layout& layout, const std::vector<Tier>& first_resting_tiers,
                                      const std::vector<uint8_t>& states_on_device, int64_t host_limit_bytes,
                                      Backwards backwards) {
  std::vector<Tier> resting_tiers = first_resting_tiers;
  for (ChunkId chunk = 0; chunk < layout.num_chunks(); ++chunk) {
    const bool moves = states_on_device[static_cast<size_t>(chunk)] != 0 && !layout.chunk(chunk).is_quantized();
    if (moves) resting_tiers[static_cast<size_t>(chunk)] = Tier::kDevice;
  }
  const int64_t taken =
      disk_sets(layout, first_resting_tiers).num_bytes() + bytes_on_host(layout, resting_tiers, backwards);
  for (ChunkId chunk : chunks_leaving_disk(layout, resting_tiers, host_limit_bytes - taken - spare_bytes(layout))) {
    resting_tiers[static_cast<size_t>(chunk)] = Tier::kHost;
  }
  return resting_tiers;
}

int64_t bytes_on_host(const Layout& layout, const std::vector<Tier>& resting_tiers, Backwards backwards) {
  int64_t bytes = 0;
  for (ChunkId chunk = 0; chunk < layout.num_chunks(); ++chunk) {
    const Tier resting_tier = resting_tiers[static_cast<size_t>(chunk)];
    if (resting_tier == Tier::kHost) bytes += held_bytes(layout, chunk, backwards);
    if (resting_tier == Tier::kDisk) bytes += bytes_beside_disk(layout, chunk, backwards);
  }
  return bytes;
}

int64_t gradient_room_bytes(const Layout& layout, const std::vector<Tier>& resting_tiers, int64_t host_limit_bytes) {
  if (!any_gradient_passes(layout)) return INT64_MAX;
  const int64_t taken =
      disk_sets(layout, resting_tiers).num_bytes() + bytes_on_host(layout, resting_tiers, Backwards::kOne);
  return std::max<int64_t>(host_limit_bytes - taken, 0);
}

}  // namespace patrickstar
