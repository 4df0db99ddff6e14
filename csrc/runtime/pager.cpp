#include "runtime/pager.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "common/check.h"
#include "runtime/victims.h"

namespace patrickstar {

namespace {

constexpr int64_t kZeroGrain = int64_t{2} << 20;  // bytes

ArrayId array_of(ArrayId id, ArrayKind kind) { return {id.chunk, kind}; }

}  // namespace

Pager::Pager(Core core) : core_(core) { core_.backend.set_pressure_handler(this); }

Pager::~Pager() { core_.backend.set_pressure_handler(nullptr); }

void Pager::begin_moment(Phase phase, const std::vector<ArrayId>& acquired) {
  ++clock_;
  ++core_.counters.num_moments;
  core_.tracer.begin_moment(phase, acquired);
  core_.recorder.begin_moment(phase, acquired, tide_of_running_moment());
  const auto t = static_cast<size_t>(core_.recorder.position());
  if (replaying_) {
    const auto& planned = core_.recorder.last().moments;
    replaying_ = t < planned.size() && planned[t].phase == phase && planned[t].acquired == acquired;
  }
  if (replaying_) {
    ++core_.counters.num_replayed_moments;
    for (ArrayId id : plan_.moments[t].evict) evict_as_planned(id);
  }
  for (ArrayId id : acquired) bring(id);
  if (replaying_) replay(t);
  // What was evicted above is not part of this moment's tide.
  if (measures_tide()) core_.backend.take_tide_peak();
  core_.tracer.settle_moment();
}

bool Pager::measures_tide() const { return !replaying_ || core_.backend.measures_tide_freely(); }

int64_t Pager::tide_of_running_moment() {
  if (measures_tide()) return core_.backend.take_tide_peak();
  const auto& planned = core_.recorder.last().moments;
  const int64_t position = core_.recorder.position();
  return position < 0 ? 0 : planned[static_cast<size_t>(position)].tide_peak_bytes;
}

void Pager::bring_untracked(const std::vector<ArrayId>& acquired) {
  ++clock_;
  for (ArrayId id : acquired) bring(id);
}

void Pager::replay(size_t moment) {
  for (ArrayId id : plan_.moments[moment].evict_ahead) evict_as_planned(id);
  const auto& planned = plan_.moments[moment].prefetch;
  postponed_.insert(postponed_.end(), planned.begin(), planned.end());
  // In order: a later one must not take the link, and the slot, of an earlier one.
  auto first_left = postponed_.begin();
  while (first_left != postponed_.end() && prefetch(*first_left)) ++first_left;
  postponed_.erase(postponed_.begin(), first_left);
}

bool Pager::prefetch(ArrayId id) {
  ArrayRecord& array = core_.store.array(id);
  if (array.on_device) return true;
  if (is_whole(id) && !array.on_host) {
    const ArrayRecord& shard = core_.store.array(array_of(id, ArrayKind::kParamShard));
    if (shard.on_host && core_.backend.waits_on_host(shard.host_ready)) return false;
    core_.collectives.gather(id.chunk);
    array.prefetched = true;
    return true;
  }
  if (array.on_host && core_.backend.waits_on_host(array.host_ready)) return false;
  {
    const TraceScope stall(core_.tracer, {Track::kStall, StallCause::kRoom, id});
    array.slot = core_.slots.acquire(core_.store.num_bytes(id));
  }
  core_.tracer.sample_memory();
  if (!array.slot) return true;  // the tide is above the trace: the use itself will make room
  if (array.on_host) {
    core_.transfer.upload(id);
  } else {
    derive_on_device(id);
  }
  array.prefetched = true;
  return true;
}

void Pager::bring(ArrayId id) {
  ArrayRecord& array = core_.store.array(id);
  array.last_use = static_cast<uint64_t>(clock_);
  if (array.on_device) {
    core_.counters.num_prefetch_hits += array.prefetched ? 1 : 0;
  } else {
    ++core_.counters.num_on_demand_fetches;
    const ScopedHold hold(array);  // making room must not evict what the derivation below reads
    if (is_whole(id) && !array.on_host) {
      fetch_whole(id);
    } else {
      ensure_slot(id);
      if (array.on_host) {
        core_.transfer.upload(id);
      } else {
        derive_on_device(id);
      }
    }
  }
  array.prefetched = false;
  core_.transfer.await_on_device(id);
  if (id.kind == ArrayKind::kParam && core_.store.storage(id.chunk)) {
    core_.store.storage(id.chunk).attach(array.slot.data);
  }
}

void Pager::fetch_whole(ArrayId id) {
  if (!replays()) return core_.collectives.need(id.chunk);
  fetch_postponed(id);
  if (!core_.store.array(id).on_device) core_.collectives.gather(id.chunk);
}

// [Note: the same order on every rank] What this rank put off, others have gathered already.
void Pager::fetch_postponed(ArrayId last) {
  while (!postponed_.empty()) {
    const ArrayId id = postponed_.front();
    postponed_.erase(postponed_.begin());
    if (!core_.store.array(id).on_device) core_.collectives.gather(id.chunk);
    if (id == last) return;
  }
}

// Deriving the compute copy: round(master), on the tier where the master is.
void Pager::derive_on_device(ArrayId id) {
  const ArrayId master_id = array_of(id, ArrayKind::kMaster);
  ArrayRecord& array = core_.store.array(id);
  ArrayRecord& master = core_.store.array(master_id);
  PS_CHECK(id.kind == ArrayKind::kParam && master.exists(), StateError, core_.store.describe(id), " has no value");
  const ChunkSpec& chunk = core_.store.layout().chunk(id.chunk);
  if (master.on_device) {
    core_.transfer.await_on_device(master_id);
    core_.transfer.await_slot(Queue::kCompute, array.slot);
    core_.device_compute.cast_from_float(static_cast<const float*>(master.slot.data), array.slot.data, chunk.dtype,
                                         chunk.numel);
    set_on_device(id);
    return;
  }
  bring_to_host(id);
  core_.transfer.upload(id);
}

void Pager::bring_to_host(ArrayId id) {
  ArrayRecord& array = core_.store.array(id);
  if (!array.on_host && array.on_device) {
    ensure_block(id);
    core_.transfer.download(id);
  }
  if (!array.on_host) {
    const ArrayId master_id = array_of(id, ArrayKind::kMaster);
    PS_CHECK(id.kind == core_.store.layout().param_home() && core_.store.array(master_id).exists(), StateError,
             core_.store.describe(id), " has no value");
    bring_to_host(master_id);
    ensure_block(id);
    const ChunkSpec& chunk = core_.store.layout().chunk(id.chunk);
    const TraceScope stall(core_.tracer, {Track::kStall, StallCause::kHostWork, id});
    core_.host_compute.cast_from_float(static_cast<const float*>(core_.store.array(master_id).block.data),
                                       array.block.data, chunk.dtype, chunk.shard_numel);
    array.on_host = true;
  }
  core_.transfer.await_on_host(id);
}

void* Pager::open_for_write(ArrayId id) {
  ArrayRecord& array = core_.store.array(id);
  array.last_use = static_cast<uint64_t>(clock_);
  if (!array.on_device) {
    ensure_slot(id);
    if (array.on_host) {
      core_.transfer.upload(id);
    } else {
      core_.transfer.await_slot(Queue::kCompute, array.slot);
    }
  }
  core_.transfer.await_on_device(id);
  // The host's copy, if any, is about to be stale.
  drop_block(id);
  set_on_device(id);
  return array.slot.data;
}

bool Pager::push_out(ArrayId id) {
  ArrayRecord& array = core_.store.array(id);
  if (!array.on_device) return true;
  if (!array.on_host) {
    if (!array.block) array.block = try_allocate_block(core_.store.num_bytes(id));
    if (!array.block) return false;
    core_.transfer.download(id);
  }
  leave_device(id);
  return true;
}

void Pager::send_to_host(ArrayId id) {
  ensure_block(id);
  push_out(id);
}

void Pager::discard(ArrayId id) {
  drop_slot(id);
  drop_block(id);
}

void Pager::drop_slot(ArrayId id) {
  leave_device(id);
  if (is_whole(id)) drop_block(id);
}

void Pager::leave_device(ArrayId id) {
  ArrayRecord& array = core_.store.array(id);
  if (!array.slot) return;
  if (id.kind == ArrayKind::kParam && core_.store.storage(id.chunk)) core_.store.storage(id.chunk).detach();
  core_.transfer.mark_busy(id);
  core_.slots.release(std::exchange(array.slot, {}));
  array.device_ready = nullptr;
  array.on_device = false;
  array.prefetched = false;
  core_.tracer.sample_memory();
}

void Pager::drop_block(ArrayId id) {
  ArrayRecord& array = core_.store.array(id);
  if (!array.block) return;
  core_.transfer.settle_block(id);
  core_.arena.free(std::exchange(array.block, {}));
  array.on_host = false;
}

HostBlock Pager::try_allocate_block(int64_t num_bytes) {
  HostBlock block = core_.arena.try_allocate(num_bytes);
  if (block || !host_pressure_handler_) return block;
  host_pressure_handler_();
  return core_.arena.try_allocate(num_bytes);
}

void Pager::ensure_block(ArrayId id) {
  ArrayRecord& array = core_.store.array(id);
  if (array.block) return;
  const int64_t num_bytes = core_.store.num_bytes(id);
  array.block = try_allocate_block(num_bytes);
  if (!array.block) array.block = core_.arena.allocate(num_bytes);  // says what is missing
}

void Pager::ensure_slot(ArrayId id) {
  ArrayRecord& array = core_.store.array(id);
  if (array.slot) return;
  array.slot = take_slot(core_.store.num_bytes(id), id);
  core_.tracer.sample_memory();
}

Slot Pager::take_slot(int64_t num_bytes, ArrayId what) {
  const TraceScope stall(core_.tracer, {Track::kStall, StallCause::kRoom, what});
  keep_within_payload_limit(num_bytes);
  Slot slot = core_.slots.acquire(num_bytes);
  while (!slot && evict_one()) slot = core_.slots.acquire(num_bytes);
  if (!slot) {
    core_.backend.reclaim();
    slot = core_.slots.acquire(num_bytes);
  }
  // What is held does not fit together with the tide. The backend's policy decides: a warm-up measures how much
  // would be needed, later it is an error that says it.
  if (!slot) slot = core_.slots.acquire(num_bytes, OverLimit::kAllow);
  PS_CHECK(slot, MemoryBudgetError, core_.store.describe(what), " needs ", num_bytes, " bytes on the device; ",
           core_.slots.used_bytes(), " bytes of chunks are in use and ", core_.backend.tide_bytes(),
           " bytes of activations, of ", core_.backend.limit_bytes(), "; raise device_memory or lower the batch size");
  return slot;
}

void Pager::set_on_device(ArrayId id) {
  ArrayRecord& array = core_.store.array(id);
  array.on_device = true;
  array.on_host = false;
}

void Pager::set_on_host(ArrayId id) {
  ArrayRecord& array = core_.store.array(id);
  array.on_host = true;
  array.on_device = false;
}

void Pager::ensure_state(ArrayId id, Tier tier) {
  ArrayRecord& array = core_.store.array(id);
  if (array.exists()) return;
  const int64_t num_bytes = core_.store.num_bytes(id);
  if (tier == Tier::kDevice) {
    ensure_slot(id);
    core_.transfer.await_slot(Queue::kCompute, array.slot);
    core_.backend.fill_zero(Queue::kCompute, array.slot.data, num_bytes);
    set_on_device(id);
    return;
  }
  ensure_block(id);
  core_.transfer.await_on_host(id);
  if (!array.block.zeroed) {
    const TraceScope stall(core_.tracer, {Track::kStall, StallCause::kHostWork, id});
    core_.pool.parallel_for(num_bytes, kZeroGrain, [&](int64_t begin, int64_t end) {
      std::memset(static_cast<char*>(array.block.data) + begin, 0, static_cast<size_t>(end - begin));
    });
  }
  set_on_host(id);
}

bool Pager::is_derivable(ArrayId id) const {
  if (is_whole(id)) return true;
  return id.kind == core_.store.layout().param_home() && core_.store.layout().chunk(id.chunk).trainable;
}

void Pager::set_plan(Plan plan, NextUse next_use) {
  plan_ = std::move(plan);
  next_use_ = std::move(next_use);
  ++core_.counters.num_plans;
  if (!plan_.moments.empty()) return;
  replaying_ = false;  // also in the middle of a step
  postponed_.clear();
}

void Pager::restart_replay() {
  replaying_ = !plan_.moments.empty();
  postponed_.clear();
  if (!core_.store.layout().is_sharded()) return;
  // All ranks begin alike, whatever an evaluation has left here.
  for (ChunkId chunk = 0; chunk < core_.store.layout().num_chunks(); ++chunk) {
    const ArrayId id{chunk, ArrayKind::kParam};
    if (is_evictable(id) || !core_.store.array(id).slot) drop_slot(id);
  }
}

int64_t Pager::next_use(ArrayId id) const { return next_use_.after(id, core_.recorder.position()); }

bool Pager::is_evictable(ArrayId id) const {
  const ArrayRecord& array = core_.store.array(id);
  return array.slot && array.on_device && array.holds == 0;
}

bool Pager::evict_one() {
  std::vector<Victim> victims;
  for (int index = 0; index < core_.store.num_arrays(); ++index) {
    const ArrayId id = ArrayId::from_index(index);
    if (!is_evictable(id)) continue;
    const ArrayRecord& array = core_.store.array(id);
    const int64_t next = next_use_.empty() ? 1 : next_use(id);
    victims.push_back({id, next, array.last_use, !array.on_host && !can_be_had_again(id)});
  }
  sort_victims(victims, static_cast<int64_t>(plan_.moments.size()));
  // One that cannot leave (host memory is full and it is dirty) does not save the others.
  return std::any_of(victims.begin(), victims.end(), [this](const Victim& victim) { return evict(victim.id); });
}

bool Pager::evict(ArrayId id) {
  if (!is_evictable(id)) return false;
  if (can_be_had_again(id)) {
    drop_slot(id);
  } else if (!push_out(id)) {
    return false;
  }
  ++core_.counters.num_evictions;
  return true;
}

// [Note: whole values on the host] While ranks replay a plan, the others gather a chunk when the plan says so and not once
// more. A rank that is short of room all the same (its batch is longer than the one that was measured) sends the whole
// values to its host and fetches them from there; they end when the plan would have them leave the device.
bool Pager::can_be_had_again(ArrayId id) const { return is_derivable(id) && !(is_whole(id) && replays()); }

void Pager::evict_as_planned(ArrayId id) {
  const ArrayRecord& array = core_.store.array(id);
  if (is_whole(id) && array.holds == 0 && !array.slot) return drop_block(id);
  if (!is_evictable(id)) return;
  if (!is_whole(id)) {
    evict(id);
    return;
  }
  drop_slot(id);
  ++core_.counters.num_evictions;
}

void Pager::keep_within_payload_limit(int64_t more_bytes) {
  while (core_.slots.used_bytes() + more_bytes > payload_limit_bytes_ && evict_one()) {
  }
}

void Pager::vacate(Vacate what) {
  for (int index = 0; index < core_.store.num_arrays(); ++index) {
    const ArrayId id = ArrayId::from_index(index);
    if (what == Vacate::kEverything || !is_optimizer_state(id.kind)) evict(id);
  }
  core_.slots.trim(INT64_MAX);
  core_.backend.reclaim();
}

void Pager::release_device_memory(int64_t num_bytes) {
  // Another thread may hold the lock while it waits for PyTorch's allocator, whose lock this thread holds on CUDA:
  // giving up after a moment is the way out of that.
  std::unique_lock<std::recursive_timed_mutex> lock(core_.mutex, std::chrono::milliseconds(50));
  if (!lock.owns_lock()) return;
  const TraceScope stall(core_.tracer, {Track::kStall, StallCause::kRoom});
  int64_t freed = core_.slots.trim(num_bytes);
  while (freed < num_bytes && evict_one()) {
    ++core_.counters.num_pressure_evictions;
    freed += core_.slots.trim(num_bytes - freed);
  }
  core_.tracer.sample_memory();
}

}  // namespace patrickstar
