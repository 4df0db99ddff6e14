#include "plan/chunk_bytes.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include "memory/disk_file.h"
#include "memory/host_arena.h"
#include "optim/kernels.h"

namespace patrickstar {

namespace {

// An in-place speculative update is expected to leave at most one scale-dependent value among this many. Not measured.
constexpr int64_t kElementsPerOpenValue = 64;

}  // namespace

int64_t optimizer_bytes(const ChunkSpec& chunk) {
  return chunk.rows.num_bytes(
      [](const ArrayRow& row) { return row.on_host == ArrayMemory::kOwn && is_optimizer_state(row.kind); });
}

int64_t resting_tier_bytes(const ChunkSpec& chunk) {
  return chunk.rows.num_bytes([](const ArrayRow& row) { return row.on_host == ArrayMemory::kOwn; });
}

int64_t accumulation_bytes(const Layout& layout, ChunkId chunk) {
  const ChunkSpec& spec = layout.chunk(chunk);
  if (!spec.trainable) return 0;
  const int64_t rounding = HostArena::most_rounding_bytes(0);  // both arrays are mapped when first needed
  const ArrayRow& gradient = spec.rows.gradient();
  return spec.num_bytes(ArrayKind::kGradSum) + (gradient.on_host == ArrayMemory::kOwn ? 0 : gradient.num_bytes) +
         rounding;
}

int64_t held_bytes(const Layout& layout, ChunkId chunk, Backwards backwards) {
  const int64_t num_bytes = resting_tier_bytes(layout.chunk(chunk));
  return backwards == Backwards::kSeveral ? num_bytes + accumulation_bytes(layout, chunk) : num_bytes;
}

int64_t placed_bytes(const ChunkSpec& chunk) {
  return chunk.rows.num_bytes([](const ArrayRow& row) { return row.on_device == ArrayMemory::kOwn; });
}

int64_t spare_bytes(const Layout& layout) {
  int64_t total = 0;
  int64_t largest = 0;
  for (const ChunkSpec& chunk : layout.chunks()) {
    total += resting_tier_bytes(chunk);
    const int count = chunk.rows.gradient().on_host == ArrayMemory::kPassing ? 2 : 1;
    largest = std::max(largest, count * chunk.rows.value().num_bytes);
  }
  return largest + HostArena::most_rounding_bytes(total);
}

int64_t disk_bytes(const ChunkSpec& chunk) {
  int64_t bytes = 0;
  if (!chunk.trainable) return bytes;
  for (ArrayKind kind : chunk.state_kinds()) bytes += DiskFile::round_up(chunk.num_bytes(kind));
  return bytes;
}

int64_t bytes_beside_disk(const Layout& layout, ChunkId chunk, Backwards backwards) {
  const ChunkSpec& spec = layout.chunk(chunk);
  const int64_t bytes = held_bytes(layout, chunk, backwards) - optimizer_bytes(spec);
  const ArrayRow& gradient = spec.rows.gradient();
  if (gradient.on_host != ArrayMemory::kPassing) return bytes;
  return bytes + gradient.num_bytes + HostArena::most_rounding_bytes(0);  // mapped when first needed
}

int64_t DiskSets::num_bytes() const {
  const int64_t bytes = count * (block_bytes[0] + block_bytes[1] + block_bytes[2]);
  return count == 0 ? 0 : bytes + HostArena::most_rounding_bytes(bytes);
}

void DiskSets::serve(const ChunkSpec& chunk) {
  count = std::min(count + 1, kNumDiskSets);
  auto bytes = block_bytes.begin();
  for (ArrayKind kind : optimizer_arrays()) {
    *bytes = std::max(*bytes, DiskFile::round_up(chunk.num_bytes(kind)));
    ++bytes;
  }
}

DiskSets disk_sets(const Layout& layout, const std::vector<Tier>& resting_tiers) {
  DiskSets sets;
  for (ChunkId chunk = 0; chunk < layout.num_chunks(); ++chunk) {
    if (resting_tiers[static_cast<size_t>(chunk)] == Tier::kDisk) sets.serve(layout.chunk(chunk));
  }
  return sets;
}

int64_t least_new_bytes(const Layout& layout, ChunkId chunk) {
  const ChunkSpec& spec = layout.chunk(chunk);
  if (spec.puts_values_in_place())
    return spec.shard_numel / kElementsPerOpenValue * optim::ScaleDependentValues::kBytes;
  return layout.num_bytes(layout.param_resting_tier(chunk));
}

int64_t round_trip_piece_bytes(const Layout& layout) {
  constexpr int64_t kArrays = 7;  // data and scales of three states, and the compute value; each starts aligned
  int64_t largest = 0;
  for (const ChunkSpec& chunk : layout.chunks()) {
    if (!chunk.trainable) continue;
    const int64_t numel = std::min(chunk.shard_numel, kRoundTripPiece);
    int64_t bytes = numel * element_size(chunk.dtype) + kArrays * kRoundTripAlignment;
    for (ArrayKind kind : chunk.state_kinds()) bytes += state_bytes(chunk.states.of(kind), numel);
    largest = std::max(largest, bytes);
  }
  return largest;
}

int64_t round_trip_bytes(const Layout& layout) { return kNumRoundTripBuffers * round_trip_piece_bytes(layout); }

std::vector<RoundTripCost> round_trip_costs(const Layout& layout) {
  std::vector<RoundTripCost> costs;
  for (const ChunkSpec& chunk : layout.chunks()) {
    const int64_t states = optimizer_bytes(chunk);
    const ArrayRow& value = chunk.rows.param();
    const int64_t up_value = value.on_device == ArrayMemory::kOwn ? value.num_bytes : 0;
    // Sharded chunk: the value that backward used is the all-gathered array, not the shard that the update writes.
    costs.push_back({states + up_value, states + value.num_bytes, chunk.is_sharded() ? 0 : up_value});
  }
  return costs;
}

int64_t reserved_gradient_bytes(const Layout& layout) {
  std::vector<int64_t> sizes;
  bool have_places = true;
  for (const ChunkSpec& chunk : layout.chunks()) {
    sizes.push_back(chunk.rows.gradient().num_bytes);
    have_places = have_places && (chunk.puts_values_in_place() || !chunk.trainable);
  }
  const int most = have_places ? 1 : kNumReservedGradients;
  const auto count = std::min<ptrdiff_t>(most, static_cast<ptrdiff_t>(sizes.size()));
  std::partial_sort(sizes.begin(), sizes.begin() + count, sizes.end(), std::greater<>());
  return std::accumulate(sizes.begin(), sizes.begin() + count, int64_t{0});
}

}  // namespace patrickstar
