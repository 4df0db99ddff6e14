#include "engine/pager.h"

#include <algorithm>
#include <utility>

#include "common/check.h"
#include "common/sizes.h"
#include "plan/chunk_bytes.h"

namespace patrickstar {

Pager::Pager(ChunkMemory& memory, DiskStates& disk, Speculation& speculation, Recorder& recorder,
             Collectives& collectives, const Step& step)
    : memory_(memory),
      disk_(disk),
      speculation_(speculation),
      recorder_(recorder),
      executor_(memory, collectives),
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
  if (!array.device_buffer) {
    const TraceScope stall(memory_.tracer(), {Track::kStall, StallCause::kRoom, id});
    array.device_buffer = acquire(store().num_bytes(id));
  }
  memory_.tracer().sample_memory();
  // Activations exceed the trace, or device buffers exceed their contents. A later access may have room, and the use
  // makes room itself.
  if (!array.device_buffer) return !gathers;
  if (gathers) {
    gather(id.chunk);
  } else {
    DeviceBuffer staging =
        needs_staging(id) ? acquire(store().num_bytes({id.chunk, ArrayKind::kQuantized})) : DeviceBuffer();
    if (needs_staging(id) && !staging) {
      memory_.leave_device(id);
      return true;
    }
    arrive(id, std::move(staging), Issue::kAhead);
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
  if (access_is_planned_ && has_outlived_plan(id)) {
    gather_in_turn(id);
  } else if (array.on_device) {
    memory_.counters().num_prefetch_hits += array.prefetched ? 1 : 0;
  } else {
    ++memory_.counters().num_on_demand_fetches;
    const ScopedHold hold(array);  // making room must not evict what the derivation below reads
    if (memory_.is_whole(id) && !array.on_host) {
      gather_in_turn(id);
    } else {
      ensure_device_buffer(id);
      arrive(id, take_staging(id), Issue::kNow);
    }
  }
  array.prefetched = false;
  memory_.await_on_device(id);
  if (id.kind == ArrayKind::kParam) memory_.attach(id.chunk);
}

void Pager::arrive(ArrayId id, DeviceBuffer staging, Issue issue) {
  const ArrayId part = part_of(id);
  const Origin origin = origin_of(part);
  const Sharing sharing = part == id ? Sharing::kOwn : Sharing::kShared;
  executor_.bring(id, part, arrival(id.index(), origin, sharing, issue), std::move(staging));
}

ArrayId Pager::part_of(ArrayId id) const {
  const bool is_gathered = memory_.is_whole(id) && !memory_.array(id).on_host;
  return is_gathered ? ArrayId{id.chunk, ArrayKind::kParamShard} : id;
}

// A value that only its master can give is rounded on the master's tier, or on the device if the host has no room.
Origin Pager::origin_of(ArrayId part) {
  const ArrayRecord& array = memory_.array(part);
  if (is_on_disk(part)) disk_.fetch(part.chunk);  // host memory has no room for its gradient: updated on the device
  if (array.on_device) return Origin::kDevice;
  if (array.on_host) return Origin::kHost;
  const Source from = layout().row(part).source;
  if (from == Source::kCodes) {
    const ArrayRecord& codes = memory_.array({part.chunk, ArrayKind::kQuantized});
    PS_CHECK(codes.exists(), StateError, store().describe(part), " has no value");
    return codes.on_device ? Origin::kCodes : Origin::kHost;
  }
  const ArrayRecord& master = memory_.array({part.chunk, ArrayKind::kMaster});
  PS_CHECK(from == Source::kMaster && master.exists(), StateError, store().describe(part), " has no value");
  if (!master.on_device && !reserve_host_buffer(part)) bring({part.chunk, ArrayKind::kMaster});
  if (master.on_device) return Origin::kDevice;
  bring_to_host(part);
  return Origin::kHost;
}

bool Pager::needs_staging(ArrayId id) const {
  return layout().row(id).source == Source::kCodes && !memory_.array(id).on_host &&
         !memory_.array({id.chunk, ArrayKind::kQuantized}).on_device;
}

DeviceBuffer Pager::take_staging(ArrayId id) {
  if (!needs_staging(id)) return {};
  const ArrayId quantized{id.chunk, ArrayKind::kQuantized};
  return take_device_buffer(store().num_bytes(quantized), quantized);
}

void Pager::gather(ChunkId chunk) {
  const ArrayId id{chunk, ArrayKind::kParam};
  ArrayRecord& array = memory_.array(id);
  const ScopedHold hold(array);
  const bool is_in_use = take_outlived(id);
  if (is_in_use) {  // the all-gather writes the buffer again while operations may read it
    memory_.drop_host_buffer(id);
    if (array.device_buffer) array.device_buffer.busy = {array.device_ready, memory_.backend().record(Queue::kCompute)};
  }
  ensure_device_buffer(id);
  arrive(id, take_staging(part_of(id)), Issue::kNow);
  // Until it is formatted, the buffer has raw values.
  if (is_in_use && memory_.has_format()) memory_.await_on_device(id);
}

void* Pager::open_for_write(ArrayId id) {
  ArrayRecord& array = memory_.array(id);
  array.last_use = static_cast<uint64_t>(clock_);
  if (!array.on_device) {
    ensure_device_buffer(id);
    if (array.on_host) {
      memory_.upload(id);
    } else {
      memory_.await_device_buffer(Queue::kCompute, array.device_buffer);
    }
  }
  memory_.await_on_device(id);
  // The host's copy, if any, becomes stale.
  memory_.drop_host_buffer(id);
  array.set_on_device();
  return array.device_buffer.data;
}

void Pager::ensure_device_buffer(ArrayId id) {
  ArrayRecord& array = memory_.array(id);
  if (array.device_buffer) return;
  // An exact fit for what stays (memory/device_buffer_pool.h).
  array.device_buffer = take_device_buffer(store().num_bytes(id), id,
                                           is_placed_on_device(id) ? DeviceBufferFit::kExact : DeviceBufferFit::kLoose);
  memory_.tracer().sample_memory();
}

void Pager::put_into_activation_memory(ArrayId grad) {
  ArrayRecord& array = memory_.array(grad);
  if (array.device_buffer || layout().row(grad).on_device != ArrayMemory::kActivationMemory) return;
  if (store().has_states_on_device(grad.chunk))
    array.device_buffer = memory_.activation_memory().acquire(store().num_bytes(grad));
}

void Pager::ensure_state(ArrayId id, Tier tier) {
  ArrayRecord& array = memory_.array(id);
  if (array.exists()) return;
  if (tier == Tier::kDevice) {
    ensure_device_buffer(id);
    memory_.await_device_buffer(Queue::kCompute, array.device_buffer);
    memory_.backend().fill_zero(Queue::kCompute, array.device_buffer.data, store().num_bytes(id));
    array.set_on_device();
    return;
  }
  ensure_host_buffer(id);
  memory_.await_on_host(id);
  if (!array.block.zeroed) memory_.clear_block(id);
  array.set_on_host();
}

// To the host.

void Pager::bring_to_host(ArrayId id) {
  ArrayRecord& array = memory_.array(id);
  if (is_on_disk(id)) disk_.fetch(id.chunk);
  if (!array.on_host && array.on_device) {
    ensure_host_buffer(id);
    memory_.download(id);
  }
  if (!array.on_host) {
    const ArrayId master{id.chunk, ArrayKind::kMaster};
    PS_CHECK(layout().row(id).source == Source::kMaster && memory_.array(master).exists(), StateError,
             store().describe(id), " has no value");
    bring_to_host(master);
    ensure_host_buffer(id);
    memory_.cast_on_host(id.chunk, array.block.data);
    array.on_host = true;
  }
  memory_.await_on_host(id);
}

bool Pager::push_out(ArrayId id, HostRoom room) {
  if (!memory_.array(id).on_device) return true;
  if (!copy_to_host(id, room)) return false;
  memory_.leave_device(id);
  return true;
}

bool Pager::copy_to_host(ArrayId id, HostRoom room) {
  const ArrayRecord& array = memory_.array(id);
  if (array.on_host) return true;
  if (!reserve_value_of(id, room) || !reserve_rest_of(id, room) || !reserve_host_buffer(id, room)) return false;
  if (!array.on_host) memory_.download(id);  // otherwise it was read from the disk
  return true;
}

bool Pager::reserve_host_buffer(ArrayId id, HostRoom room) {
  ArrayRecord& array = memory_.array(id);
  if (is_on_disk(id)) disk_.fetch(id.chunk);
  if (!array.block) array.block = try_allocate_host_buffer(id, room);
  if (array.block) memory_.arena().prepare(array.block);
  return static_cast<bool>(array.block);
}

// If the master is on the host, its compute value is rounded there and needs a host buffer.
bool Pager::reserve_value_of(ArrayId id, HostRoom room) {
  const ArrayRow& value = store().chunk(id.chunk).rows.param();
  const bool is_made_of_it = id.kind == ArrayKind::kMaster && value.source == Source::kMaster;
  if (!is_made_of_it || memory_.array({id.chunk, value.shares_with}).block) return true;
  return reserve_host_buffer({id.chunk, value.kind}, room);
}

// An update happens where the chunk's leading state is. Before the leading state leaves the device, the host must have
// room for all other arrays of the update. The others may leave alone, since the update brings them back. Chunks that
// rest on the host have reserved room for all.
bool Pager::reserve_rest_of(ArrayId id, HostRoom room) {
  const ChunkSpec& spec = store().chunk(id.chunk);
  if (!spec.trainable || store().resting_tier(id.chunk) != Tier::kDevice || id.kind != spec.leading_state())
    return true;
  std::vector<ArrayId> rest;
  for (const ArrayRow& row : spec.rows) {
    const ArrayId other{id.chunk, row.kind};
    const bool lasts = row.on_host == ArrayMemory::kOwn && row.source == Source::kNone;
    if (lasts && other != id && !memory_.array(other).block) rest.push_back(other);
  }
  for (size_t i = 0; i < rest.size(); ++i) {
    if (reserve_host_buffer(rest[i], room)) continue;
    for (size_t reserved = 0; reserved < i; ++reserved) memory_.drop_host_buffer(rest[reserved]);
    return false;
  }
  return true;
}

void Pager::send_to_host(ArrayId id) {
  ensure_host_buffer(id);
  push_out(id);
}

void Pager::ensure_host_buffer(ArrayId id) {
  PS_CHECK(reserve_host_buffer(id), MemoryBudgetError, "host memory: ", store().describe(id), " needs ",
           show_exactly(store().num_bytes(id)), " more, ", show_exactly(memory_.arena().used_bytes()), " of ",
           show_exactly(memory_.arena().limit_bytes()), " are in use and ", show_exactly(reserved_host_bytes()),
           " set aside; raise host_memory, or give the device more of the model with ", "device_memory");
}

HostBuffer Pager::try_allocate_host_buffer(ArrayId id, HostRoom room) {
  // A gradient that keeps its memory until its update may take memory of an earlier one, or waits for it.
  const bool waits = store().chunk(id.chunk).keeps_param();
  if (waits) speculation_.free_completed();
  HostBuffer block = try_allocate_beside_reservations(id);
  if (block || (room == HostRoom::kFree && !is_reserved(id))) return block;
  if (waits) {
    const TraceScope stall(memory_.tracer(), {Track::kStall, StallCause::kHostUpdate, id});
    while (!block && speculation_.await_free()) block = try_allocate_beside_reservations(id);
    if (block) return block;
  }
  speculation_.release_memory();
  return try_allocate_beside_reservations(id);
}

}  // namespace patrickstar
