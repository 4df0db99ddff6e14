// The pager's eviction on the device (engine/pager.h).
#include <algorithm>

#include "common/check.h"
#include "common/sizes.h"
#include "engine/pager.h"

namespace patrickstar {

namespace {

struct Victim {
  ArrayId id;
  int64_t farness;  // accesses until its next use, capped for dirty arrays; larger ones leave first
  uint64_t last_use;
};

// States leave after all values: their farness is below that of any value.
constexpr int64_t kStateFarness = 0;
constexpr int64_t kLeadingStateFarness = -1;

// Evaluations and generation use chunks in the order of parameters, over and over. The chunk that was just left is
// needed last. A few are kept, since modules need not run in the order of registration.
int64_t chunks_until_next_sweep(ChunkId chunk, ChunkId position, int num_chunks) {
  constexpr int kKeptBehind = 2;
  return (chunk - position + num_chunks + kKeptBehind) % num_chunks;
}

}  // namespace

DeviceBuffer Pager::acquire(int64_t num_bytes, DeviceBufferFit fit) {
  DeviceBuffer device_buffer = memory_.device_buffers().acquire(num_bytes, fit);
  if (device_buffer || memory_.device().take_from_others(*this, num_bytes, EvictionScope::kValues) == 0)
    return device_buffer;
  return memory_.device_buffers().acquire(num_bytes, fit);
}

DeviceBuffer Pager::take_device_buffer(int64_t num_bytes, ArrayId what, DeviceBufferFit fit) {
  DeviceBufferPool& device_buffers = memory_.device_buffers();
  Backend& backend = memory_.backend();
  const TraceScope stall(memory_.tracer(), {Track::kStall, StallCause::kRoom, what});
  const bool evaluates = step_.is(StepState::kEvaluation);
  const int64_t limit = evaluates ? chunk_buffer_limit_.evaluation_bytes : chunk_buffer_limit_.most_bytes;
  // Exceeding the limit is no shortage yet, so speculative updates keep their memory.
  while (device_buffers.used_bytes() + num_bytes > limit &&
         evict_one(EvictionScope::kEverything, HostRoom::kFree, RoomFor::kLimit)) {
  }
  DeviceBuffer device_buffer = acquire(num_bytes, fit);
  while (!device_buffer && evict_one(EvictionScope::kEverything, HostRoom::kFree))
    device_buffer = device_buffers.acquire(num_bytes, fit);
  if (!device_buffer && backend.reclaimable_bytes() >= num_bytes) {
    backend.reclaim();
    device_buffer = device_buffers.acquire(num_bytes, fit);
  }
  while (!device_buffer && evict_one(EvictionScope::kEverything, HostRoom::kOfUpdatesAhead))
    device_buffer = device_buffers.acquire(num_bytes, fit);
  if (!device_buffer) {
    memory_.device().take_from_others(*this, num_bytes, EvictionScope::kEverything);
    backend.reclaim();
    device_buffer = device_buffers.acquire(num_bytes, fit);
  }
  // Chunks in use and activations together exceed the limit. The backend's policy decides: the first step measures the
  // need, later steps fail with an error that names it.
  if (!device_buffer) device_buffer = device_buffers.acquire(num_bytes, fit, OverLimit::kAllow);
  if (!device_buffer) {
    const int64_t chunks = device_buffers.used_bytes();
    const int64_t activations = backend.activation_bytes();
    throw MemoryBudgetError(detail::join(
        store().describe(what), " needs ", show_exactly(num_bytes), " on the device; ", show_exactly(chunks),
        " of chunks are in use and ", show_exactly(activations), " of activations, of ",
        show_exactly(backend.limit_bytes()), "; ", step_.is_recorded() ? kCheckpointOrSmallerBatch : kSmallerBatch,
        ", or raise device_memory to at least ", show_enough(chunks + activations + num_bytes),
        "; later accesses may need more"));
  }
  return device_buffer;
}

DeviceBuffer Pager::try_take_device_buffer(int64_t num_bytes) {
  const TraceScope stall(memory_.tracer(), {Track::kStall, StallCause::kRoom});
  DeviceBuffer device_buffer = acquire(num_bytes);
  while (!device_buffer && evict_one(EvictionScope::kValues, HostRoom::kFree))
    device_buffer = memory_.device_buffers().acquire(num_bytes);
  return device_buffer;
}

ChunkId Pager::latest_used_chunk() const {
  uint64_t latest = 0;
  ChunkId found = 0;
  for (int index = 0; index < store().num_arrays(); ++index) {
    const ArrayId id = ArrayId::from_index(index);
    if (memory_.array(id).last_use <= latest) continue;
    latest = memory_.array(id).last_use;
    found = id.chunk;
  }
  return found;
}

bool Pager::is_evictable(ArrayId id) const {
  const ArrayRecord& array = memory_.array(id);
  return array.device_buffer && array.on_device && array.holds == 0;
}

// Before it sorts, skips arrays whose copy has no room on the host: a full device runs this for each buffer.
bool Pager::evict_one(EvictionScope what, HostRoom room, RoomFor room_for) {
  const auto num_accesses = static_cast<int64_t>(plan().accesses.size());
  const int64_t best_effort_room =
      room == HostRoom::kFree ? memory_.arena().free_bytes() - reserved_host_bytes() : INT64_MAX;
  const bool sweeps = step_.is(StepState::kEvaluation);
  const ChunkId position = sweeps ? latest_used_chunk() : 0;
  std::vector<Victim> victims;
  for (int index = 0; index < store().num_arrays(); ++index) {
    const ArrayId id = ArrayId::from_index(index);
    const bool is_state = is_placed_on_device(id);
    if (!is_evictable(id) || (is_state && what == EvictionScope::kValues)) continue;
    const ArrayRecord& array = memory_.array(id);
    if (room_for != RoomFor::kActivations && array.device_buffer.belongs_to(memory_.activation_memory())) continue;
    const bool dirty = !array.on_host && !can_be_had_again(id);
    // Such copies are made only for lack of memory; see evict().
    if (dirty && room_for == RoomFor::kLimit && store().chunk(id.chunk).is_sharded() && replays()) continue;
    if (dirty && !array.block && !is_reserved(id) && store().num_bytes(id) > best_effort_room) continue;
    int64_t farness = sweeps                 ? chunks_until_next_sweep(id.chunk, position, store().num_chunks())
                      : replay_.knows_uses() ? next_use(id)
                                             : 1;
    if (dirty) farness = std::min(farness, num_accesses);
    const bool leads = id.kind == store().chunk(id.chunk).leading_state();
    if (is_state) farness = leads ? kLeadingStateFarness : kStateFarness;
    victims.push_back({id, farness, array.last_use});
  }
  std::sort(victims.begin(), victims.end(), [](const Victim& a, const Victim& b) {
    return a.farness != b.farness ? a.farness > b.farness : a.last_use < b.last_use;
  });
  // If the first choice cannot leave (its only copy, and host memory is full), the next one is tried.
  return std::any_of(victims.begin(), victims.end(), [&](const Victim& victim) { return evict(victim.id, room); });
}

// While ranks replay a plan, an evicted value cannot be all-gathered again: the others enqueue an all-gather only when
// the plan has one. A rank may still be short of room, for example if its batch is longer than the measured one. It
// then copies whole values and whole gradients to its host, and fetches values from there until the plan evicts them.
//
// Lack of memory alone is a reason for such copies, RoomFor::kLimit is not. Device buffers exceed their contents
// (memory/device_buffer_pool.h), so in a full plan nearly every new buffer exceeds the limit slightly. The copies would
// take the host memory of complete gradients. A planned all-gather that finds no room waits for a later access, in
// order ([Note: the same order on every rank]).
bool Pager::evict(ArrayId id, HostRoom room) {
  if (!is_evictable(id)) return false;
  const bool is_elsewhere = can_be_had_again(id) || memory_.array(id).on_host;
  for (const Instruction& instruction : departure(id.index(), is_elsewhere ? Copy::kElsewhere : Copy::kOnly)) {
    if (instruction.op == Op::kEvict && !copy_to_host(id, room)) return false;
    if (instruction.op == Op::kFree) can_be_had_again(id) ? memory_.drop_device_buffer(id) : memory_.leave_device(id);
  }
  ++memory_.counters().num_evictions;
  return true;
}

void Pager::evict_all(EvictionScope what) {
  memory_.device().take_from_others(*this, INT64_MAX, what);
  for (int index = 0; index < store().num_arrays(); ++index) {
    const ArrayId id = ArrayId::from_index(index);
    if (what == EvictionScope::kEverything || !is_placed_on_device(id)) evict(id, HostRoom::kOfUpdatesAhead);
  }
  memory_.device_buffers().trim(INT64_MAX);
  memory_.backend().reclaim();
}

int64_t Pager::shrink_to(int64_t keep_bytes) {
  const auto leaves = [&](HostRoom room) { return evict_one(EvictionScope::kEverything, room, RoomFor::kActivations); };
  while (array_bytes() > keep_bytes && (leaves(HostRoom::kFree) || leaves(HostRoom::kOfUpdatesAhead))) {
  }
  memory_.device_buffers().trim(INT64_MAX);
  memory_.backend().reclaim();
  return array_bytes();
}

int64_t Pager::array_bytes() const {
  int64_t bytes = 0;
  for (int index = 0; index < store().num_arrays(); ++index)
    bytes += memory_.array(ArrayId::from_index(index)).device_buffer.num_bytes;
  return bytes;
}

void Pager::drop_derivable() {
  for (int index = 0; index < store().num_arrays(); ++index) {
    const ArrayId id = ArrayId::from_index(index);
    if (!is_placed_on_device(id) && is_evictable(id) && can_be_had_again(id)) memory_.drop_device_buffer(id);
  }
  memory_.device_buffers().trim(INT64_MAX);
}

int64_t Pager::trim(int64_t num_bytes) {
  const int64_t freed = memory_.device_buffers().trim(num_bytes);
  memory_.tracer().sample_memory();
  return freed;
}

int64_t Pager::give_up(int64_t num_bytes, EvictionScope what) {
  const TraceScope stall(memory_.tracer(), {Track::kStall, StallCause::kRoom});
  const auto leaves = [&](HostRoom room) { return evict_one(what, room, RoomFor::kActivations); };
  int64_t freed = 0;
  int64_t lent = memory_.activation_memory().lent_bytes();
  while (freed < num_bytes && (leaves(HostRoom::kFree) || leaves(HostRoom::kOfUpdatesAhead))) {
    ++memory_.counters().num_pressure_evictions;
    freed += lent - memory_.activation_memory().lent_bytes();
    lent = memory_.activation_memory().lent_bytes();
    freed += memory_.device_buffers().trim(num_bytes - freed);
  }
  memory_.tracer().sample_memory();
  return freed;
}

int64_t Pager::state_bytes() const {
  int64_t bytes = 0;
  for (int index = 0; index < store().num_arrays(); ++index) {
    const ArrayId id = ArrayId::from_index(index);
    if (is_placed_on_device(id)) bytes += memory_.array(id).device_buffer.num_bytes;
  }
  return bytes;
}

int64_t Pager::value_bytes() const {
  int64_t bytes = 0;
  for (ChunkId chunk = 0; chunk < store().num_chunks(); ++chunk)
    bytes += layout().num_bytes({chunk, ArrayKind::kParam});
  return bytes;
}

}  // namespace patrickstar
