// The pager's allocation of host memory (engine/pager.h).
#include "engine/pager.h"
#include "plan/chunk_bytes.h"

namespace patrickstar {

// Reserved memory is left to reservations ([Note: resting tiers on the host]) while any is open. The spare bytes serve
// short-lived arrays: a gradient whose parameters are still used, or a frozen value being written.
HostBuffer Pager::try_allocate_beside_reservations(ArrayId id) {
  const int64_t num_bytes = store().num_bytes(id);
  if (is_reserved(id)) return memory_.arena().try_allocate(num_bytes);
  const bool takes_spare = store().resting_tier(id.chunk) != Tier::kDevice || !store().chunk(id.chunk).trainable;
  return try_allocate_in_room(num_bytes, takes_spare ? 0 : spare_bytes(layout()));
}

HostBuffer Pager::try_allocate_in_room(int64_t num_bytes, int64_t spare) {
  HostArena& arena = memory_.arena();
  const int64_t reserved = reserved_host_bytes();
  if (num_bytes > arena.free_bytes() - reserved - spare) return {};
  return reserved == 0 ? arena.try_allocate(num_bytes) : arena.try_allocate_unreserved(num_bytes);
}

HostBuffer Pager::try_allocate_best_effort(int64_t num_bytes) {
  const int64_t spare = spare_bytes(layout());
  speculation_.free_completed();
  HostBuffer block = try_allocate_in_room(num_bytes, spare);
  if (!block) {
    speculation_.release_memory();
    block = try_allocate_in_room(num_bytes, spare);
  }
  if (block) memory_.arena().prepare(block);
  return block;
}

HostBuffer Pager::try_allocate_resting_tier(int64_t num_bytes) {
  speculation_.free_completed();
  HostBuffer block = try_allocate_in_room(num_bytes, spare_bytes(layout()));
  if (block) memory_.arena().prepare(block);
  return block;
}

int64_t Pager::best_effort_room_bytes() const {
  return memory_.arena().free_bytes() - reserved_host_bytes() - spare_bytes(layout());
}

bool Pager::is_reserved(ArrayId id) const {
  const bool has_resting_tier = store().resting_tier(id.chunk) != Tier::kDevice || keeps_place(id.chunk);
  if (!has_resting_tier || is_on_disk(id) || memory_.array(id).block) return false;
  if (is_optimizer_state(id.kind)) return true;  // also of a chunk that is about to be trained
  const ArrayRow& row = layout().row(id);
  return row.has_place_on_host() && !memory_.array({id.chunk, row.shares_with}).block;
}

bool Pager::is_on_disk(ArrayId id) const { return is_optimizer_state(id.kind) && disk_.is_resting_tier_of(id.chunk); }

bool Pager::is_placed_on_device(ArrayId id) const {
  if (is_optimizer_state(id.kind) || id.kind == ArrayKind::kQuantized) return true;
  return layout().row(id).on_device == ArrayMemory::kOwn && store().has_states_on_device(id.chunk);
}

int64_t Pager::reserved_host_bytes() const {
  int64_t bytes = 0;
  for (ChunkId chunk = 0; chunk < store().num_chunks(); ++chunk) {
    bytes += store().chunk(chunk).rows.num_bytes([&](const ArrayRow& row) {
      return row.on_host == ArrayMemory::kOwn &&
             is_reserved({chunk, row.kind});  // an array that shares its place counts once
    });
  }
  return bytes;
}

}  // namespace patrickstar
