#include "engine/pager.h"

#include <algorithm>
#include <utility>

#include "common/check.h"
#include "plan/chunk_bytes.h"

namespace patrickstar {

namespace {

struct Victim {
  ArrayId id;
  int64_t farness;  // moments until its next use, at most; larger ones leave first
  uint64_t last_use;
};

// [Note: what leaves first] Below that of any value.
constexpr int64_t kStateFarness = 0;
constexpr int64_t kLeadingStateFarness = -1;

bool is_optimizer_state(ArrayKind kind) {
  const OptimizerArrays states = optimizer_arrays();
  return std::find(states.begin(), states.end(), kind) != states.end();
}

}  // namespace

Pager::Pager(ChunkMemory& memory, DiskStates& disk, Speculation& speculation, Recorder& recorder,
             Collectives& collectives, const Step& step)
    : memory_(memory),
      disk_(disk),
      speculation_(speculation),
      recorder_(recorder),
      collectives_(collectives),
      step_(step),
      keeps_place_(static_cast<size_t>(memory.layout().num_chunks()), 0) {
  memory_.device().join(*this);
}

Pager::~Pager() { memory_.device().leave(*this); }

// To the device.

bool Pager::prefetch(ArrayId id) {
  ArrayRecord& array = memory_.array(id);
  const bool outlives = has_outlived_plan(id);
  if (array.on_device && !outlives) return true;
  const bool gathers = memory_.is_whole(id) && (!array.on_host || outlives);
  const ArrayRecord& source = gathers ? memory_.array({id.chunk, ArrayKind::kParamShard}) : array;
  if (source.on_host && memory_.backend().waits_on_host(source.host_ready)) return false;
  if (!array.slot) {
    const TraceScope stall(memory_.tracer(), {Track::kStall, StallCause::kRoom, id});
    array.slot = acquire(store().num_bytes(id));
  }
  memory_.tracer().sample_memory();
  // The tide is above the trace, or slots are larger than what they hold: a moment later there may be room, and the use
  // itself makes it.
  if (!array.slot) return !gathers;
  if (gathers) {
    gather(id.chunk);
  } else {
    Slot staging = needs_staging(id) ? acquire(store().num_bytes({id.chunk, ArrayKind::kQuantized})) : Slot();
    if (needs_staging(id) && !staging) {
      memory_.leave_device(id);
      return true;
    }
    fetch_into_slot(id, std::move(staging));
  }
  array.prefetched = true;
  return true;
}

bool Pager::needs_gather(ArrayId id) const {
  const ArrayRecord& array = memory_.array(id);
  return memory_.is_whole(id) && !array.on_device && !array.on_host;
}

void Pager::bring(ArrayId id) {
  ArrayRecord& array = memory_.array(id);
  array.last_use = static_cast<uint64_t>(clock_);
  if (moment_is_planned_ && has_outlived_plan(id)) {
    gather_in_turn(id);
  } else if (array.on_device) {
    memory_.counters().num_prefetch_hits += array.prefetched ? 1 : 0;
  } else {
    ++memory_.counters().num_on_demand_fetches;
    const ScopedHold hold(array);  // making room must not evict what the derivation below reads
    if (memory_.is_whole(id) && !array.on_host) {
      gather_in_turn(id);
    } else {
      ensure_slot(id);
      fetch_into_slot(id, take_staging(id));
    }
  }
  array.prefetched = false;
  memory_.await_on_device(id);
  if (id.kind == ArrayKind::kParam) memory_.attach(id.chunk);
}

// Uploads the value, or derives it: round(master), on the tier where the master is, but on the device where the host
// has no room for it.
void Pager::fetch_into_slot(ArrayId id, Slot staging) {
  ArrayRecord& array = memory_.array(id);
  if (id.kind == ArrayKind::kParam && store().chunk(id.chunk).is_quantized() && !array.on_host) {
    array.device_ready = dequantize(id.chunk, array.slot.data, array.slot, std::move(staging));
    array.set_on_device();
    return;
  }
  const ArrayRecord& master = memory_.array({id.chunk, ArrayKind::kMaster});
  if (is_on_disk(id)) disk_.fetch(id.chunk);  // no room on the host for its gradient: updated on the device
  if (!array.on_host) {
    PS_CHECK(id.kind == ArrayKind::kParam && store().chunk(id.chunk).derives_param() && master.exists(), StateError,
             store().describe(id), " has no value");
    if (!master.on_device && !reserve_block(id)) bring({id.chunk, ArrayKind::kMaster});
    if (master.on_device) {
      memory_.await_slot(Queue::kCompute, array.slot);
      memory_.cast_on_device(id.chunk, array.slot.data);
      array.set_on_device();
      return;
    }
    bring_to_host(id);
  }
  memory_.upload(id);
}

bool Pager::needs_staging(ArrayId id) const {
  return id.kind == ArrayKind::kParam && store().chunk(id.chunk).is_quantized() && !memory_.array(id).on_host &&
         !memory_.array({id.chunk, ArrayKind::kQuantized}).on_device;
}

Slot Pager::take_staging(ArrayId id) {
  if (!needs_staging(id)) return {};
  const ArrayId quantized{id.chunk, ArrayKind::kQuantized};
  return take_slot(store().num_bytes(quantized), quantized);
}

Event Pager::dequantize(ChunkId chunk, void* to, Slot& slot, Slot staging) {
  const ArrayId id{chunk, ArrayKind::kQuantized};
  ArrayRecord& codes = memory_.array(id);
  PS_CHECK(codes.exists(), StateError, store().describe(id), " has no value");
  Backend& backend = memory_.backend();
  if (codes.on_device) {
    memory_.await_slot(Queue::kCompute, slot);
    memory_.await_on_device(id);
    memory_.dequantize(Queue::kCompute, chunk, codes.slot.data, to);
    return backend.record(Queue::kCompute);
  }
  memory_.upload_to(id, staging.data, staging);
  memory_.await_slot(Queue::kUpload, slot);
  memory_.dequantize(Queue::kUpload, chunk, staging.data, to);
  const Event made = backend.record(Queue::kUpload);
  staging.busy = {made, nullptr};
  slot.busy = {made, nullptr};
  return made;
}

void Pager::gather(ChunkId chunk) {
  const ArrayId id{chunk, ArrayKind::kParam};
  const int64_t num_bytes = layout().num_bytes(id);
  const int64_t shard_bytes = layout().num_bytes({chunk, ArrayKind::kParamShard});
  Backend& backend = memory_.backend();
  ArrayRecord& array = memory_.array(id);
  const ScopedHold hold(array);
  if (take_outlived(id)) {  // its own values come once more, to where operations may be reading them
    memory_.drop_block(id);
    if (array.slot) array.slot.busy = {array.device_ready, backend.record(Queue::kCompute)};
  }
  ensure_slot(id);
  char* place = static_cast<char*>(array.slot.data) + layout().sharding().rank * shard_bytes;
  backend.wait(Queue::kGather, place_shard(chunk, place, array.slot));
  {
    const TraceScope span(memory_.tracer(), {Track::kGather, StallCause::kNone, id, num_bytes - shard_bytes});
    backend.enqueue(Queue::kGather, [&group = collectives_.gather_group(), whole = array.slot.data, shard_bytes] {
      group.all_gather(whole, shard_bytes);
    });
  }
  memory_.counters().gathered_bytes += num_bytes - shard_bytes;
  array.device_ready = backend.record(Queue::kGather);
  array.slot.busy = {array.device_ready, nullptr};
  array.set_on_device();
}

// Returns the event after which this rank's shard is in `place`, which lies in `slot`.
Event Pager::place_shard(ChunkId chunk, void* place, Slot& slot) {
  const ArrayId shard{chunk, ArrayKind::kParamShard};
  if (store().chunk(chunk).is_quantized()) {
    return dequantize(chunk, place, slot, take_staging({chunk, ArrayKind::kParam}));
  }
  const bool kept = store().chunk(chunk).keeps_param();
  if (kept ? !memory_.array(shard).on_device : !store().has_states_on_device(chunk)) {
    bring_to_host(shard);
    return memory_.upload_to(shard, place, slot);
  }
  memory_.await_slot(Queue::kCompute, slot);
  if (kept) {
    memory_.copy_on_device(shard, place);
  } else {
    memory_.cast_on_device(chunk, place);
  }
  return memory_.backend().record(Queue::kCompute);
}

void* Pager::open_for_write(ArrayId id) {
  ArrayRecord& array = memory_.array(id);
  array.last_use = static_cast<uint64_t>(clock_);
  if (!array.on_device) {
    ensure_slot(id);
    if (array.on_host) {
      memory_.upload(id);
    } else {
      memory_.await_slot(Queue::kCompute, array.slot);
    }
  }
  memory_.await_on_device(id);
  // The host's copy, if any, is about to be stale.
  memory_.drop_block(id);
  array.set_on_device();
  return array.slot.data;
}

void Pager::ensure_slot(ArrayId id) {
  ArrayRecord& array = memory_.array(id);
  if (array.slot) return;
  // [Note: what stays fits] (memory/slot_pool.h)
  array.slot = take_slot(store().num_bytes(id), id, is_placed_on_device(id) ? SlotFit::kExact : SlotFit::kLoose);
  memory_.tracer().sample_memory();
}

void Pager::put_into_tide(ArrayId grad) {
  ArrayRecord& array = memory_.array(grad);
  if (array.slot || layout().is_sharded() || !store().chunk(grad.chunk).puts_values_in_place()) return;
  if (store().has_states_on_device(grad.chunk)) array.slot = memory_.tide_memory().acquire(store().num_bytes(grad));
}

void Pager::ensure_state(ArrayId id, Tier tier) {
  ArrayRecord& array = memory_.array(id);
  if (array.exists()) return;
  if (tier == Tier::kDevice) {
    ensure_slot(id);
    memory_.await_slot(Queue::kCompute, array.slot);
    memory_.backend().fill_zero(Queue::kCompute, array.slot.data, store().num_bytes(id));
    array.set_on_device();
    return;
  }
  ensure_block(id);
  memory_.await_on_host(id);
  if (!array.block.zeroed) memory_.clear_block(id);
  array.set_on_host();
}

// To the host.

void Pager::bring_to_host(ArrayId id) {
  ArrayRecord& array = memory_.array(id);
  if (is_on_disk(id)) disk_.fetch(id.chunk);
  if (!array.on_host && array.on_device) {
    ensure_block(id);
    memory_.download(id);
  }
  if (!array.on_host) {
    const ArrayId master{id.chunk, ArrayKind::kMaster};
    PS_CHECK(
        id.kind == layout().param_home() && store().chunk(id.chunk).derives_param() && memory_.array(master).exists(),
        StateError, store().describe(id), " has no value");
    bring_to_host(master);
    ensure_block(id);
    memory_.cast_on_host(id.chunk, array.block.data);
    array.on_host = true;
  }
  memory_.await_on_host(id);
}

bool Pager::push_out(ArrayId id, HostRoom room) {
  ArrayRecord& array = memory_.array(id);
  if (!array.on_device) return true;
  if (!array.on_host) {
    if (!reserve_value_of(id, room) || !reserve_rest_of(id, room) || !reserve_block(id, room)) return false;
    if (!array.on_host) memory_.download(id);  // else the disk has it
  }
  memory_.leave_device(id);
  return true;
}

bool Pager::reserve_block(ArrayId id, HostRoom room) {
  ArrayRecord& array = memory_.array(id);
  if (is_on_disk(id)) disk_.fetch(id.chunk);
  if (!array.block) array.block = try_allocate_block(id, room);
  if (array.block) memory_.arena().prepare(array.block);
  return static_cast<bool>(array.block);
}

// A compute value that is rounded from its master is, where that is on the host, rounded there.
bool Pager::reserve_value_of(ArrayId id, HostRoom room) {
  const ArrayId grad{id.chunk, layout().grad_home()};
  if (id.kind != ArrayKind::kMaster || !store().chunk(id.chunk).derives_param() || memory_.array(grad).block)
    return true;
  return reserve_block({id.chunk, layout().param_home()}, room);
}

// [Note: leading states leave last] Where a chunk's leading state is, it is updated, so before it leaves, all else that
// the update needs has room there. The others may leave alone: the update brings them back. Homes on the host have room
// for all.
bool Pager::reserve_rest_of(ArrayId id, HostRoom room) {
  const ChunkSpec& spec = store().chunk(id.chunk);
  if (!spec.trainable || store().home(id.chunk) != Tier::kDevice || id.kind != spec.leading_state()) return true;
  std::vector<ArrayId> rest;
  for (ArrayKind kind : spec.state_kinds()) rest.push_back({id.chunk, kind});
  if (spec.keeps_param()) rest.push_back({id.chunk, layout().param_home()});
  if (spec.keeps_gradient()) rest.push_back({id.chunk, layout().grad_home()});
  const auto has_place = [&](ArrayId other) { return other == id || memory_.array(other).block; };
  rest.erase(std::remove_if(rest.begin(), rest.end(), has_place), rest.end());
  for (size_t i = 0; i < rest.size(); ++i) {
    if (reserve_block(rest[i], room)) continue;
    for (size_t reserved = 0; reserved < i; ++reserved) memory_.drop_block(rest[reserved]);
    return false;
  }
  return true;
}

void Pager::send_to_host(ArrayId id) {
  ensure_block(id);
  push_out(id);
}

void Pager::ensure_block(ArrayId id) {
  PS_CHECK(reserve_block(id), MemoryBudgetError, "host memory: ", store().describe(id), " needs ",
           store().num_bytes(id), " bytes more, ", memory_.arena().used_bytes(), " of ", memory_.arena().limit_bytes(),
           " are in use and ", promised_host_bytes(),
           " set aside; raise host_memory, or give the device more of the model with ", "device_memory");
}

HostBlock Pager::try_allocate_block(ArrayId id, HostRoom room) {
  // Gradients that have memory of their own until their update take that of those before them, or wait for it.
  const bool waits = store().chunk(id.chunk).keeps_param();
  if (waits) speculation_.free_completed();
  HostBlock block = try_allocate_beside_promises(id);
  if (block || (room == HostRoom::kFree && !is_promised(id))) return block;
  if (waits) {
    const TraceScope stall(memory_.tracer(), {Track::kStall, StallCause::kHostUpdate, id});
    while (!block && speculation_.await_free()) block = try_allocate_beside_promises(id);
    if (block) return block;
  }
  speculation_.release_memory();
  return try_allocate_beside_promises(id);
}

// [Note: homes on the host]. What was reserved fits the promises, so it is left to them while any is open. The spare is
// for what goes away again: a gradient whose parameters are still of use, a frozen value that is being written.
HostBlock Pager::try_allocate_beside_promises(ArrayId id) {
  const int64_t num_bytes = store().num_bytes(id);
  if (is_promised(id)) return memory_.arena().try_allocate(num_bytes);
  const bool takes_spare = store().home(id.chunk) != Tier::kDevice || !store().chunk(id.chunk).trainable;
  return try_allocate_in_room(num_bytes, takes_spare ? 0 : spare_bytes(layout()));
}

HostBlock Pager::try_allocate_in_room(int64_t num_bytes, int64_t spare) {
  HostArena& arena = memory_.arena();
  const int64_t promised = promised_host_bytes();
  if (num_bytes > arena.free_bytes() - promised - spare) return {};
  return promised == 0 ? arena.try_allocate(num_bytes) : arena.try_allocate_unreserved(num_bytes);
}

HostBlock Pager::try_allocate_guest(int64_t num_bytes) {
  const int64_t spare = spare_bytes(layout());
  speculation_.free_completed();
  HostBlock block = try_allocate_in_room(num_bytes, spare);
  if (!block) {
    speculation_.release_memory();
    block = try_allocate_in_room(num_bytes, spare);
  }
  if (block) memory_.arena().prepare(block);
  return block;
}

HostBlock Pager::try_allocate_home(int64_t num_bytes) {
  speculation_.free_completed();
  HostBlock block = try_allocate_in_room(num_bytes, spare_bytes(layout()));
  if (block) memory_.arena().prepare(block);
  return block;
}

int64_t Pager::guest_room_bytes() const {
  return memory_.arena().free_bytes() - promised_host_bytes() - spare_bytes(layout());
}

bool Pager::is_promised(ArrayId id) const {
  if (keeps_place(id.chunk)) return id == layout().value_home(id.chunk) && !memory_.array(id).block;
  if (store().home(id.chunk) == Tier::kDevice || is_on_disk(id)) return false;
  if (is_optimizer_state(id.kind)) return true;
  if (store().chunk(id.chunk).is_quantized()) return id.kind == ArrayKind::kQuantized && !memory_.array(id).block;
  const ArrayId param{id.chunk, layout().param_home()};
  const ArrayId grad{id.chunk, layout().grad_home()};
  if (id == grad && store().chunk(id.chunk).keeps_gradient()) return !memory_.array(grad).block;
  if (!store().chunk(id.chunk).derives_param()) return id == param && !memory_.array(param).block;
  return (id == param || id == grad) && !memory_.array(param).block && !memory_.array(grad).block;
}

bool Pager::is_on_disk(ArrayId id) const { return is_optimizer_state(id.kind) && disk_.is_home_of(id.chunk); }

bool Pager::is_placed_on_device(ArrayId id) const {
  if (is_optimizer_state(id.kind) || id.kind == ArrayKind::kQuantized) return true;
  const ChunkSpec& spec = store().chunk(id.chunk);
  const bool is_part = (id.kind == layout().param_home() && spec.keeps_param()) ||
                       (id.kind == layout().grad_home() && spec.reserves_gradient());
  return is_part && store().has_states_on_device(id.chunk);
}

int64_t Pager::promised_host_bytes() const {
  int64_t bytes = 0;
  for (ChunkId chunk = 0; chunk < store().num_chunks(); ++chunk) {
    const ArrayId value = layout().value_home(chunk);
    if (is_promised(value)) bytes += store().num_bytes(value);
    const ArrayId grad{chunk, layout().grad_home()};
    if (store().chunk(chunk).keeps_gradient() && is_promised(grad)) bytes += store().num_bytes(grad);
    if (!store().chunk(chunk).trainable || store().home(chunk) != Tier::kHost) continue;
    for (ArrayKind kind : store().chunk(chunk).state_kinds()) {
      if (!memory_.array({chunk, kind}).block) bytes += store().num_bytes({chunk, kind});
    }
  }
  return bytes;
}

// Room on the device.

Slot Pager::acquire(int64_t num_bytes, SlotFit fit) {
  Slot slot = memory_.slots().acquire(num_bytes, fit);
  if (slot || memory_.device().take_from_others(*this, num_bytes, Vacate::kValues) == 0) return slot;
  return memory_.slots().acquire(num_bytes, fit);
}

Slot Pager::take_slot(int64_t num_bytes, ArrayId what, SlotFit fit) {
  SlotPool& slots = memory_.slots();
  Backend& backend = memory_.backend();
  const TraceScope stall(memory_.tracer(), {Track::kStall, StallCause::kRoom, what});
  // More than the limit is no shortage yet: updates ahead of the step keep their memory.
  while (slots.used_bytes() + num_bytes > payload_limit_bytes_ &&
         evict_one(Vacate::kEverything, HostRoom::kFree, RoomFor::kLimit)) {
  }
  Slot slot = acquire(num_bytes, fit);
  while (!slot && evict_one(Vacate::kEverything, HostRoom::kFree)) slot = slots.acquire(num_bytes, fit);
  if (!slot && backend.reclaimable_bytes() >= num_bytes) {
    backend.reclaim();
    slot = slots.acquire(num_bytes, fit);
  }
  while (!slot && evict_one(Vacate::kEverything, HostRoom::kOfUpdatesAhead)) slot = slots.acquire(num_bytes, fit);
  if (!slot) {
    memory_.device().take_from_others(*this, num_bytes, Vacate::kEverything);
    backend.reclaim();
    slot = slots.acquire(num_bytes, fit);
  }
  // What is held does not fit together with the tide. The backend's policy decides: a warm-up measures how much
  // would be needed, later it is an error that says it.
  if (!slot) slot = slots.acquire(num_bytes, fit, OverLimit::kAllow);
  PS_CHECK(slot, MemoryBudgetError, store().describe(what), " needs ", num_bytes, " bytes on the device; ",
           slots.used_bytes(), " bytes of chunks are in use and ", backend.tide_bytes(), " bytes of activations, of ",
           backend.limit_bytes(), "; raise device_memory or lower the batch size");
  return slot;
}

Slot Pager::try_take_slot(int64_t num_bytes) {
  const TraceScope stall(memory_.tracer(), {Track::kStall, StallCause::kRoom});
  Slot slot = acquire(num_bytes);
  while (!slot && evict_one(Vacate::kValues, HostRoom::kFree)) slot = memory_.slots().acquire(num_bytes);
  return slot;
}

bool Pager::is_evictable(ArrayId id) const {
  const ArrayRecord& array = memory_.array(id);
  return array.slot && array.on_device && array.holds == 0;
}

// What would need a copy for which the host has no room is passed over at once: on a full device this runs for each
// slot.
bool Pager::evict_one(Vacate what, HostRoom room, RoomFor room_for) {
  const auto num_moments = static_cast<int64_t>(plan().moments.size());
  const int64_t guest_room = room == HostRoom::kFree ? memory_.arena().free_bytes() - promised_host_bytes() : INT64_MAX;
  std::vector<Victim> victims;
  for (int index = 0; index < store().num_arrays(); ++index) {
    const ArrayId id = ArrayId::from_index(index);
    const bool is_state = is_placed_on_device(id);
    if (!is_evictable(id) || (is_state && what == Vacate::kValues)) continue;
    const ArrayRecord& array = memory_.array(id);
    if (room_for != RoomFor::kActivations && array.slot.belongs_to(memory_.tide_memory())) continue;
    const bool dirty = !array.on_host && !can_be_had_again(id);
    // [Note: whole values on the host]
    if (dirty && room_for == RoomFor::kLimit && layout().is_sharded() && replays()) continue;
    if (dirty && !array.block && !is_promised(id) && store().num_bytes(id) > guest_room) continue;
    int64_t farness = replay_.knows_uses() ? next_use(id) : 1;
    if (dirty) farness = std::min(farness, num_moments);
    const bool leads = id.kind == store().chunk(id.chunk).leading_state();
    if (is_state) farness = leads ? kLeadingStateFarness : kStateFarness;
    victims.push_back({id, farness, array.last_use});
  }
  std::sort(victims.begin(), victims.end(), [](const Victim& a, const Victim& b) {
    return a.farness != b.farness ? a.farness > b.farness : a.last_use < b.last_use;
  });
  // One that cannot leave (host memory is full and it is dirty) does not save the others.
  return std::any_of(victims.begin(), victims.end(), [&](const Victim& victim) { return evict(victim.id, room); });
}

// [Note: whole values on the host] While ranks replay a plan, the others gather a chunk when the plan says so and not
// once more. A rank that is short of room all the same (its batch is longer than the one that was measured) sends the
// whole values to its host and fetches them from there; they end when the plan would have them leave the device. It
// does so for want of memory alone, and with whole gradients too, not where payloads are over their limit
// (RoomFor::kLimit): slots are larger than what they hold ([Note: rare sizes], memory/slot_pool.h), so where a plan
// fills the limit nearly every new slot exceeds it by a little. Nearly every value went down just before the plan
// dropped it, and gradients between two of their parts; in the host's memory they took the room of complete gradients,
// which then filled the device. A gather ahead that finds no room waits for a later moment, in turn ([Note: the same
// order on every rank]).
bool Pager::evict(ArrayId id, HostRoom room) {
  if (!is_evictable(id)) return false;
  if (can_be_had_again(id)) {
    memory_.drop_slot(id);
  } else if (!push_out(id, room)) {
    return false;
  }
  ++memory_.counters().num_evictions;
  return true;
}

void Pager::vacate(Vacate what) {
  memory_.device().take_from_others(*this, INT64_MAX, what);
  for (int index = 0; index < store().num_arrays(); ++index) {
    const ArrayId id = ArrayId::from_index(index);
    if (what == Vacate::kEverything || !is_placed_on_device(id)) evict(id, HostRoom::kOfUpdatesAhead);
  }
  memory_.slots().trim(INT64_MAX);
  memory_.backend().reclaim();
}

void Pager::drop_derivable() {
  for (int index = 0; index < store().num_arrays(); ++index) {
    const ArrayId id = ArrayId::from_index(index);
    if (!is_placed_on_device(id) && is_evictable(id) && can_be_had_again(id)) memory_.drop_slot(id);
  }
  memory_.slots().trim(INT64_MAX);
}

int64_t Pager::trim(int64_t num_bytes) {
  const int64_t freed = memory_.slots().trim(num_bytes);
  memory_.tracer().sample_memory();
  return freed;
}

int64_t Pager::give_up(int64_t num_bytes, Vacate what) {
  const TraceScope stall(memory_.tracer(), {Track::kStall, StallCause::kRoom});
  const auto leaves = [&](HostRoom room) { return evict_one(what, room, RoomFor::kActivations); };
  int64_t freed = 0;
  int64_t lent = memory_.tide_memory().lent_bytes();
  while (freed < num_bytes && (leaves(HostRoom::kFree) || leaves(HostRoom::kOfUpdatesAhead))) {
    ++memory_.counters().num_pressure_evictions;
    freed += lent - memory_.tide_memory().lent_bytes();
    lent = memory_.tide_memory().lent_bytes();
    freed += memory_.slots().trim(num_bytes - freed);
  }
  memory_.tracer().sample_memory();
  return freed;
}

int64_t Pager::state_bytes() const {
  int64_t bytes = 0;
  for (int index = 0; index < store().num_arrays(); ++index) {
    const ArrayId id = ArrayId::from_index(index);
    if (is_placed_on_device(id)) bytes += memory_.array(id).slot.num_bytes;
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
