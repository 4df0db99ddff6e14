// The pager brings payloads to the device and decides what leaves it.
//
// It replays the plan while the step goes as planned; otherwise it fetches on demand and evicts by the order below. It
// never evicts an array that a running operation holds. Its answers do not change any number, only where bytes are.
//
// [Note: what leaves first] The array whose next use is farthest, as last observed (Belady's rule); of two alike the
// one that was used longest ago. An array whose only value is on the device counts as used at the step's end at the
// latest, where the optimizer reads it. Optimizer states live on the device by placement, and are the last to go, a
// chunk's leading one (ChunkSpec::leading_state) after all others.
//
// [Note: homes on the host] Where chunks are at home on the host, it has memory for each of their arrays, and only that
// is promised. What comes down from the device beside it (of chunks that are at home there, or a second array in the
// place of one) is a guest: it gets what no home will need. So an update always finds its memory, and what finds none
// stays on the device. Frozen chunks that leave the host keep their place (keep_place()). Memory of updates ahead of
// the step is taken from them where a home needs it, and for a guest when nothing else can leave the device.
//
// A moment is brought in by its caller, array by array (engine/access_tracker.h), since with several ranks some arrays
// are other ranks' to give. There its caller has put the plan to the right place before (engine/rank_turns.h).
//
//   pager.begin_moment(phase, arrays);
//   for (ArrayId id : arrays) pager.bring(id);
//   pager.settle_moment();
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
#include "engine/step_state.h"
#include "plan/planner.h"
#include "trace/recorder.h"

namespace patrickstar {

// Which host memory may be had for what leaves the device.
enum class HostRoom : uint8_t {
  kFree,
  kOfUpdatesAhead,  // also that
};

// What needs room on the device.
enum class RoomFor : uint8_t {
  kSlot,
  kLimit,        // a slot for which there is memory, though payloads exceed their limit
  kActivations,  // which what lies in the tide leaves it to as well ([Note: gradients in the tide])
};

class Pager final : public Tenant {
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

  // Records that a moment begins with `acquired` (sorted param arrays), and evicts what the plan says for it.
  void begin_moment(Phase phase, const std::vector<ArrayId>& acquired);
  // They are there: starts what the plan fetches ahead.
  void settle_moment();
  // Uses outside of a training step (evaluation, the user's own access) are no moments.
  void begin_untracked_use() {
    ++clock_;
    moment_is_planned_ = false;
  }

  // Makes sure that the value is on the device (uploading, deriving or gathering it) and that compute waits for it.
  void bring(ArrayId id);
  // Whether bring() needs an all-gather.
  bool needs_gather(ArrayId id) const;
  // A slot that the compute queue may write, with the array's present value if it has one.
  void* open_for_write(ArrayId id);
  // Makes sure that the value is in host memory and complete there.
  void bring_to_host(ArrayId id);
  // Starts the copy to the host and frees the slot. False when host memory has no room for it.
  bool push_out(ArrayId id, HostRoom room = HostRoom::kOfUpdatesAhead);
  // The same, and an error when there is no room; host_ready says when the copy is complete.
  void send_to_host(ArrayId id);
  // A block for `id` (if it has none).
  void ensure_block(ArrayId id);
  // A slot for `id` (if it has none), making room for it.
  void ensure_slot(ArrayId id);
  // [Note: gradients in the tide] The gradient, which waits on the device, gets memory there if there is some.
  void put_into_tide(ArrayId grad);
  // A slot for something that is no array, making room for it. `what` is for the error message.
  Slot take_slot(int64_t num_bytes, ArrayId what, SlotFit fit = SlotFit::kLoose);
  // The same where compute values that can leave are enough, or an empty one.
  Slot try_take_slot(int64_t num_bytes);
  // Host memory for something that is no array, prepared, also that of updates ahead; empty where homes need it.
  HostBlock try_allocate_guest(int64_t num_bytes);
  // The same for something that is at home on the host from now on; updates ahead keep theirs.
  HostBlock try_allocate_home(int64_t num_bytes);
  // What there is of it, as far as it is in one piece.
  int64_t guest_room_bytes() const;
  // Of arrays that are at home on the host, or keep their place there, what has no block.
  int64_t promised_host_bytes() const;
  // The frozen chunk's values leave the host for the device, and may come back: updates ahead may have their place
  // meanwhile, guests may not.
  void keep_place(ChunkId chunk) { keeps_place_[static_cast<size_t>(chunk)] = 1; }
  bool keeps_place(ChunkId chunk) const {
    return keeps_place_[static_cast<size_t>(chunk)] != 0 && !store().chunk(chunk).trainable;
  }
  // Makes an optimizer array of zeros on `tier`, unless it exists. Moments are made at their first use, so that before
  // training the arena holds masters only.
  void ensure_state(ArrayId id, Tier tier);
  // Enqueues the gather of a chunk's compute values from all ranks, which all must in the same order: this rank's shard
  // goes up into its place in the chunk's slot, or is cast there from a master on the device; an all-gather in place
  // brings the others'.
  void gather(ChunkId chunk);

  // Next step's plan. `payload_limit_bytes` bounds payloads whatever the tide (in the warm-up).
  void set_plan(Plan plan, NextUse next_use);
  void set_payload_limit(int64_t payload_limit_bytes) { payload_limit_bytes_ = payload_limit_bytes; }
  void restart_replay();
  // With several ranks: this rank's part in the next planned moment, which its own model leaves out.
  void skip_moment();
  // With several ranks: all-gathers that the plan had earlier and that found no room; the first `most` of them.
  void gather_postponed(size_t most = SIZE_MAX);
  // The rest of the step is fetched on demand. With several ranks all must call it at the same position of the plan.
  void leave_plan();
  PlanReplay& replay() { return replay_; }
  const PlanReplay& replay() const { return replay_; }
  const Plan& plan() const { return replay_.plan(); }
  // The running step has followed its plan so far, on all ranks.
  bool replays() const { return replay_.is_running(); }
  // Highest tide since the running moment began; while a replay makes measuring needless, the planned one.
  int64_t tide_of_running_moment();
  int64_t next_use(ArrayId id) const { return replay_.next_use(id, recorder_.position()); }

  // Fetches it ahead of its use where there is room. False when it is too early: what makes the host's copy is still
  // running, or there is no room for what all ranks gather.
  bool prefetch(ArrayId id);

  // Pushes out what can leave.
  void vacate(Vacate what);
  // Frees what the device has and could have again from other arrays or ranks.
  void drop_derivable();

  int64_t trim(int64_t num_bytes) override;
  int64_t give_up(int64_t num_bytes, Vacate what) override;
  bool is_running() const override { return step_.is_running(); }
  int64_t state_bytes() const override;
  int64_t value_bytes() const override;

 private:
  bool measures_tide() const { return !replays() || memory_.device().backend().measures_tide_freely(); }
  void begin_planned();
  void settle_planned();
  // The value comes into the array's slot. `staging`: as take_staging() gives it for its part.
  void arrive(ArrayId id, Slot staging, Issue issue);
  // This rank's part of a value that is gathered, or all of another.
  ArrayId part_of(ArrayId id) const;
  // Where the part can be copied or made from: what is missing there is brought. Throws StateError where there is none.
  Origin origin_of(ArrayId part);
  // [Note: staging] (engine/executor.h)
  bool needs_staging(ArrayId id) const;
  Slot take_staging(ArrayId id);
  // With several ranks, in a replay: gathers what was postponed, up to the chunk.
  void gather_in_turn(ArrayId id);
  // With several ranks: the plan has evicted values that an operation of this rank still holds. They count as absent
  // for the plan's next all-gather, as on the other ranks, and leave when the operation is over.
  bool has_outlived_plan(ArrayId id) const;
  bool take_outlived(ArrayId id);
  void drop_outlived();
  // Also where another engine must make room.
  Slot acquire(int64_t num_bytes, SlotFit fit = SlotFit::kLoose);
  // A block for `id`, or for the compute value that only the host could make once `id` is there; false: there is no
  // room.
  bool reserve_block(ArrayId id, HostRoom room = HostRoom::kOfUpdatesAhead);
  bool reserve_value_of(ArrayId id, HostRoom room);
  // Where `id` is a leading state: for all else that must be where it is.
  bool reserve_rest_of(ArrayId id, HostRoom room);
  HostBlock try_allocate_block(ArrayId id, HostRoom room);
  HostBlock try_allocate_beside_promises(ArrayId id);
  HostBlock try_allocate_in_room(int64_t num_bytes, int64_t spare);
  bool is_promised(ArrayId id) const;
  // An optimizer state whose home is the disk, through which host memory is lent to it.
  bool is_on_disk(ArrayId id) const;
  // Lives on the device by placement just now: an optimizer state, a compute value that is a part of one, or quantised
  // values.
  bool is_placed_on_device(ArrayId id) const;

  // Whether its value can be had again without a copy of it: rounded from its master, dequantised, or gathered.
  bool can_be_had_again(ArrayId id) const { return memory_.is_derivable(id) && !(memory_.is_whole(id) && replays()); }
  bool is_evictable(ArrayId id) const;
  bool evict(ArrayId id, HostRoom room);
  // The array is on the device. False when host memory has no room for it.
  bool copy_to_host(ArrayId id, HostRoom room);
  void evict_as_planned(ArrayId id);
  // [Note: what leaves first]. False when nothing can leave into such room.
  bool evict_one(Vacate what, HostRoom room, RoomFor room_for = RoomFor::kSlot);

  ChunkMemory& memory_;
  DiskStates& disk_;
  Speculation& speculation_;
  Recorder& recorder_;
  Executor executor_;
  const Step& step_;
  PlanReplay replay_;
  bool moment_is_planned_ = false;    // the running one
  std::vector<ArrayId> postponed_;    // prefetches that came too early
  std::vector<ArrayId> outlived_;     // has_outlived_plan()
  std::vector<uint8_t> keeps_place_;  // by chunk: on the host
  int64_t payload_limit_bytes_ = INT64_MAX;
  int64_t clock_ = 0;  // moments so far, over all steps; for least recent use
};

}  // namespace patrickstar
