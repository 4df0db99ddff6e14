// The pager brings chunk buffers to the device and decides what leaves it. While a step goes as planned it replays the
// plan; otherwise it fetches on demand. It never evicts an array that a running operation holds. Its decisions change
// only where bytes are, never a number.
//
// Order of eviction:
//
// - the array whose next use is farthest, as last observed (Belady's rule); among equals, the least recently used
// - an array whose only copy is on the device counts as used at the end of the step
// - optimizer states placed on the device leave last, a chunk's leading state (ChunkSpec::leading_state) after the
//   others
//
// [Note: resting tiers on the host] For chunks that rest on the host, host memory is reserved for each of their arrays.
// Anything else that comes down from the device is a best-effort allocation: an array of a chunk that rests on the
// device, or a second array in the place of a reserved one. It gets only memory that no reservation needs. So an update
// always finds its memory, and an array without host memory stays on the device. Frozen chunks that leave the host keep
// their reservation (keep_place()). Reservations take memory from speculative updates at any time, best-effort
// allocations only if nothing else can leave the device.
//
// A caller brings the arrays of an access one by one (engine/access_tracker.h), since with several ranks some of them
// need an all-gather. The caller advances the plan to the access first (engine/rank_turns.h).
//
//   pager.begin_access(phase, arrays);
//   for (ArrayId id : arrays) pager.bring(id);
//   pager.settle_access();
//
// Guarded by the engine's lock.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/chunk_memory.h"
#include "engine/collectives.h"
#include "engine/disk_states.h"
#include "engine/executor.h"
#include "engine/plan_replay.h"
#include "engine/speculation.h"
#include "engine/step_paths.h"
#include "engine/step_state.h"
#include "plan/planner.h"
#include "trace/recorder.h"

namespace patrickstar {

// Host memory that may be used for what leaves the device.
enum class HostRoom : uint8_t {
  kFree,
  kOfUpdatesAhead,  // also memory of speculative updates
};

// Purpose of the room that is made on the device.
enum class RoomFor : uint8_t {
  kDeviceBuffer,
  kLimit,        // a device buffer that has memory, but exceeds chunk_buffer_limit_
  kActivations,  // activations: gradients in activation memory leave as well
};

class Pager final : public MemoryClient {
 public:
  Pager(ChunkMemory& memory, DiskStates& disk, Speculation& speculation, Recorder& recorder, Collectives& collectives,
        const Step& step);
  ~Pager() override;

  ChunkMemory& memory() { return memory_; }
  const ChunkMemory& memory() const { return memory_; }
  ChunkStore& store() { return memory_.store(); }
  const ChunkStore& store() const { return memory_.store(); }
  const Layout& layout() const { return memory_.layout(); }
  DiskStates& disk() { return disk_; }

  // Records an access with `acquired` (sorted param arrays), and carries out the plan's evictions for it.
  void begin_access(Phase phase, const std::vector<ArrayId>& acquired);
  // The arrays of the access are on the device: starts the plan's prefetches.
  void settle_access();
  // Uses outside of a training step (evaluation, the user's own access) are not recorded.
  void begin_untracked_use() {
    ++clock_;
    access_is_planned_ = false;
  }

  // Brings the value to the device (by upload, derivation or all-gather); the compute queue waits for it.
  void bring(ArrayId id);
  bool needs_gather(ArrayId id) const;
  // A device buffer that the compute queue may write, with the array's present value if it has one.
  void* open_for_write(ArrayId id);
  // Brings the value to host memory; returns when it is complete.
  void bring_to_host(ArrayId id);
  // Starts the copy to the host and frees the device buffer. False if host memory has no room.
  bool push_out(ArrayId id, HostRoom room = HostRoom::kOfUpdatesAhead);
  // push_out(), but throws without room. host_ready completes with the copy.
  void send_to_host(ArrayId id);
  void ensure_host_buffer(ArrayId id);
  void ensure_device_buffer(ArrayId id);
  // Puts a gradient that waits on the device into memory that activations have left, if there is some
  // (`ActivationMemory`).
  void put_into_activation_memory(ArrayId grad);
  // A device buffer for something that is no array, making room for it. `what`: for the error message.
  DeviceBuffer take_device_buffer(int64_t num_bytes, ArrayId what, DeviceBufferFit fit = DeviceBufferFit::kLoose);
  // take_device_buffer(), but evicts compute values alone; an empty buffer if that is not enough.
  DeviceBuffer try_take_device_buffer(int64_t num_bytes);
  // Prepared host memory for something that is no array, also from speculative updates; empty if reservations need it.
  HostBuffer try_allocate_best_effort(int64_t num_bytes);
  // Prepared host memory for something that rests on the host from now on; takes nothing from speculative updates.
  HostBuffer try_allocate_resting_tier(int64_t num_bytes);
  // Bytes that best-effort allocations may take, if contiguous.
  int64_t best_effort_room_bytes() const;
  // Reserved bytes for arrays without a host buffer, of chunks that rest on the host or keep their place there.
  int64_t reserved_host_bytes() const;
  // The frozen chunk's values leave the host and may come back. Speculative updates may use their place meanwhile,
  // best-effort allocations may not.
  void keep_place(ChunkId chunk) { keeps_place_[static_cast<size_t>(chunk)] = 1; }
  bool keeps_place(ChunkId chunk) const {
    return keeps_place_[static_cast<size_t>(chunk)] != 0 && !store().chunk(chunk).trainable;
  }
  // Makes a state of zeros on `tier` unless it exists. States other than masters are made at their first use, so before
  // training the arena holds masters alone.
  void ensure_state(ArrayId id, Tier tier);
  // All-gathers a chunk's compute values; all ranks must call it in the same order. This rank's shard is uploaded into
  // its place in the device buffer, or cast there from a master on the device. The all-gather in place brings the
  // others.
  void gather(ChunkId chunk);

  // The next step's plan; null: it fetches on demand. The caller keeps `path`.
  void set_path(const StepPath* path);
  // Bounds chunk buffers on the device, whatever activations take.
  void limit_chunk_buffers(const ChunkBufferLimit& limit);
  void restart_replay();
  // The running step goes on in another plan, of a path that makes the same accesses up to here. Values that the plan
  // expects here are fetched in the order of need, others leave. All ranks must call it at the same position.
  void switch_to(const StepPath& path);
  // With several ranks: this rank's part in the next planned access, which its own model leaves out.
  void skip_access();
  // With several ranks: enqueues the first `most` of the planned all-gathers that found no room.
  void gather_postponed(size_t most = SIZE_MAX);
  // Fetches on demand for the rest of the step. All ranks must call it at the same position of the plan.
  void leave_plan();
  PlanReplay& replay() { return replay_; }
  const PlanReplay& replay() const { return replay_; }
  // Empty if there is none.
  const Plan& plan() const;
  // True while the running step has followed its plan, on all ranks.
  bool replays() const { return replay_.is_running(); }
  // Peak activation memory since the running access began; the planned one while a replay makes measuring needless.
  int64_t activation_memory_of_running_access();
  int64_t next_use(ArrayId id) const { return replay_.next_use(id, recorder_.position()); }

  // Fetches the value before its use, if there is room. False if it is too early: the host still makes the value, or an
  // all-gather found no room.
  bool prefetch(ArrayId id);

  // Evicts all that can leave.
  void evict_all(EvictionScope what);
  // Evicts until chunks take at most `keep_bytes`, optimizer states last. Returns the bytes that stay: more if host
  // memory has no room for them.
  int64_t shrink_to(int64_t keep_bytes);
  // Frees values that can be made again from other arrays or ranks.
  void drop_derivable();

  int64_t trim(int64_t num_bytes) override;
  int64_t give_up(int64_t num_bytes, EvictionScope what) override;
  bool is_running() const override { return step_.is_running(); }
  int64_t state_bytes() const override;
  int64_t value_bytes() const override;

 private:
  bool measures_activation_memory() const {
    const bool is_known = replays() && replay_.course() == PlanReplay::Course::kExact;
    return !is_known || memory_.device().backend().measures_activation_memory_freely();
  }
  // The step is about to differ from the plan: activation memory is measured from here on.
  void measure_from_here();
  void begin_planned();
  void settle_planned();
  // Brings the value into the array's device buffer. `staging`: take_staging() of its part.
  void arrive(ArrayId id, DeviceBuffer staging, Issue issue);
  // This rank's shard of a value that needs an all-gather; otherwise `id`.
  ArrayId part_of(ArrayId id) const;
  // Source of the part; a missing source is brought first. Throws StateError if there is none.
  Origin origin_of(ArrayId part);
  // Staging memory for codes of a quantised chunk (Executor::bring).
  bool needs_staging(ArrayId id) const;
  DeviceBuffer take_staging(ArrayId id);
  // With several ranks, in a replay: enqueues postponed all-gathers, up to the chunk's.
  void gather_in_turn(ArrayId id);
  // With several ranks: the plan has evicted values that an operation of this rank still holds. They count as absent
  // for the plan's next all-gather, as on the other ranks, and leave after the operation.
  bool has_outlived_plan(ArrayId id) const;
  bool take_outlived(ArrayId id);
  void drop_outlived();
  // Also takes memory from other engines.
  DeviceBuffer acquire(int64_t num_bytes, DeviceBufferFit fit = DeviceBufferFit::kLoose);
  // A host buffer for `id`, or for the compute value that the host alone can make once `id` is there. False: no room.
  bool reserve_host_buffer(ArrayId id, HostRoom room = HostRoom::kOfUpdatesAhead);
  bool reserve_value_of(ArrayId id, HostRoom room);
  // If `id` is a leading state: host buffers for all other arrays that the update needs.
  bool reserve_rest_of(ArrayId id, HostRoom room);
  HostBuffer try_allocate_host_buffer(ArrayId id, HostRoom room);
  HostBuffer try_allocate_beside_reservations(ArrayId id);
  HostBuffer try_allocate_in_room(int64_t num_bytes, int64_t spare);
  bool is_reserved(ArrayId id) const;
  // A state that rests on the disk; a set of DiskStates lends it host memory.
  bool is_on_disk(ArrayId id) const;
  // On the device by placement at present: a state, a compute value that is part of one, or quantised values.
  bool is_placed_on_device(ArrayId id) const;

  // The value can be made again without a copy: rounded from its master, dequantised, or all-gathered.
  bool can_be_had_again(ArrayId id) const { return memory_.is_derivable(id) && !(memory_.is_whole(id) && replays()); }
  // Bytes of all arrays' device buffers.
  int64_t array_bytes() const;
  ChunkId latest_used_chunk() const;
  bool is_evictable(ArrayId id) const;
  bool evict(ArrayId id, HostRoom room);
  // The array is on the device. False if host memory has no room.
  bool copy_to_host(ArrayId id, HostRoom room);
  void evict_as_planned(ArrayId id);
  // Evicts one array, in the pager's order of eviction. False if nothing can leave into such room.
  bool evict_one(EvictionScope what, HostRoom room, RoomFor room_for = RoomFor::kDeviceBuffer);

  ChunkMemory& memory_;
  DiskStates& disk_;
  Speculation& speculation_;
  Recorder& recorder_;
  Executor executor_;
  const Step& step_;
  PlanReplay replay_;
  bool access_is_planned_ = false;    // the running access is a planned one
  std::vector<ArrayId> postponed_;    // prefetches that came too early
  std::vector<ArrayId> outlived_;     // has_outlived_plan()
  std::vector<uint8_t> keeps_place_;  // by chunk: keep_place()
  ChunkBufferLimit chunk_buffer_limit_;
  int64_t clock_ = 0;  // accesses so far, over all steps; for least recent use
};

}  // namespace patrickstar
