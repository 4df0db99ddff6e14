// The pager brings payloads to the device and decides what leaves it.
//
// It replays the plan while the step goes as planned; otherwise it fetches on demand and evicts by farthest
// next use as last observed (by least recent use while nothing was observed yet). It never evicts an array
// that a running operation holds. Its answers do not change any number, only where bytes are.
//
// As the backend's pressure handler it is also asked for memory from inside PyTorch's allocator.
// Guarded by the runtime's lock, which it shares for that purpose.
#pragma once

#include <cstdint>
#include <functional>
#include <mutex>
#include <utility>
#include <vector>

#include "backend/backend.h"
#include "chunk/chunk_store.h"
#include "memory/host_arena.h"
#include "memory/slot_pool.h"
#include "optim/compute.h"
#include "plan/planner.h"
#include "runtime/collectives.h"
#include "runtime/counters.h"
#include "trace/recorder.h"
#include "transfer/transfer_engine.h"

namespace patrickstar {

// What the parts of the runtime share. Owned by Runtime, which outlives them.
struct Core {
  Backend& backend;
  ChunkStore& store;
  SlotPool& slots;
  HostArena& arena;
  TransferEngine& transfer;
  ThreadPool& pool;
  optim::Compute& host_compute;
  optim::Compute& device_compute;
  Recorder& recorder;
  Counters& counters;
  Tracer& tracer;
  Collectives& collectives;
  std::recursive_timed_mutex& mutex;
};

// What vacating the device concerns.
enum class Vacate : uint8_t {
  kValues,      // compute copies and gradients, which come and go anyway
  kEverything,  // optimizer states as well, which then stay on the host
};

class Pager final : public PressureHandler {
 public:
  explicit Pager(Core core);
  ~Pager() override;

  // Starts a moment: records it, does what the plan says for it, and brings `acquired` in (sorted param arrays).
  void begin_moment(Phase phase, const std::vector<ArrayId>& acquired);
  // Same without a record: uses outside of a training step (evaluation, the user's own access).
  void bring_untracked(const std::vector<ArrayId>& acquired);

  // A slot that the compute queue may write, with the array's present value if it has one.
  void* open_for_write(ArrayId id);
  // Makes sure that the value is on the device (uploading or deriving it) and that compute waits for it.
  void bring(ArrayId id);
  // Makes sure that the value is in host memory and complete there.
  void bring_to_host(ArrayId id);
  // Starts the copy to the host and frees the slot. False when host memory has no room for it.
  bool push_out(ArrayId id);
  // The same, and an error when there is no room; host_ready says when the copy is complete.
  void send_to_host(ArrayId id);
  // Forgets the value, wherever it is.
  void discard(ArrayId id);
  // Frees the device slot; the value must be on the host as well, derivable or dead. Whole values of several ranks leave
  // the host too.
  void drop_slot(ArrayId id);
  // Frees the host block; the value must be on the device as well or dead.
  void drop_block(ArrayId id);
  // A block for `id` (if it has none).
  void ensure_block(ArrayId id);
  // A slot for `id` (if it has none), making room for it.
  void ensure_slot(ArrayId id);
  // A slot for something that is no array, making room for it. `what` is for the error message.
  Slot take_slot(int64_t num_bytes, ArrayId what);
  // After the device's copy was written by compute: it is the current value.
  void set_on_device(ArrayId id);
  // After the host's copy was written: it is the current value.
  void set_on_host(ArrayId id);

  // Makes an optimizer array of zeros on `tier`, unless it exists. Moments are made at their first use, so that before
  // training the arena holds masters only.
  void ensure_state(ArrayId id, Tier tier);

  // The compute value of a trainable chunk is round(master): it can be dropped at any time. A frozen one's is all there
  // is.
  bool is_derivable(ArrayId id) const;

  // Next step's plan. `payload_limit_bytes` bounds payloads whatever the tide (warm-up, static partition).
  void set_plan(Plan plan, NextUse next_use);
  void set_payload_limit(int64_t payload_limit_bytes) { payload_limit_bytes_ = payload_limit_bytes; }
  void restart_replay();
  const Plan& plan() const { return plan_; }
  // The next moment is taken for the planned one.
  bool is_replaying() const { return replaying_; }
  // The running step goes as planned so far, on all ranks.
  bool replays() const { return replaying_ && core_.recorder.position() >= 0; }
  // Highest tide since the running moment began; while a replay makes measuring needless, the planned one.
  int64_t tide_of_running_moment();
  int64_t next_use(ArrayId id) const;

  void release_device_memory(int64_t num_bytes) override;
  // Pushes out what can leave.
  void vacate(Vacate what);

  // Called when host memory is short, before that becomes an error.
  void set_host_pressure_handler(std::function<void()> handler) { host_pressure_handler_ = std::move(handler); }

 private:
  bool measures_tide() const;
  void replay(size_t moment);
  // False when it is too early: what makes the host's copy is still running.
  bool prefetch(ArrayId id);
  void derive_on_device(ArrayId id);
  // With several ranks: makes a chunk's compute values whole, or says that this rank needs them.
  void fetch_whole(ArrayId id);
  void fetch_postponed(ArrayId last);
  bool is_whole(ArrayId id) const { return core_.store.layout().is_sharded() && id.kind == ArrayKind::kParam; }
  bool evict(ArrayId id);
  void evict_as_planned(ArrayId id);
  void leave_device(ArrayId id);
  // Whether its value can be had again without a copy of it: rounded from its master, or gathered.
  bool can_be_had_again(ArrayId id) const;
  bool is_evictable(ArrayId id) const;
  // Evicts the array whose next use is farthest. False when nothing can leave.
  bool evict_one();
  HostBlock try_allocate_block(int64_t num_bytes);
  void keep_within_payload_limit(int64_t more_bytes);

  Core core_;
  std::function<void()> host_pressure_handler_;
  Plan plan_;
  NextUse next_use_;
  bool replaying_ = false;
  std::vector<ArrayId> postponed_;  // prefetches that came too early
  int64_t payload_limit_bytes_ = INT64_MAX;
  int64_t clock_ = 0;  // moments so far, over all steps; for least recent use
};

}  // namespace patrickstar
