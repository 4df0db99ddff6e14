// Speculation: updates on the host that start before it is known whether the step will be what it is expected to be.
//
// Clipping and loss scaling make a chunk's update depend on the norm of all gradients, which is known when backward is
// over. Nearly always the factor is the expected one. So a chunk is updated as soon as its gradient is on the host,
// into memory of its own; the step then either takes the new values over, which moves nothing, or drops them and
// updates the chunk with what it really got. [Note: exact speculation] The old states and the gradient stay untouched
// until then, and what is taken over was computed from the very inputs of the step, so results do not depend on it.
//
// That memory takes 14 bytes per parameter in 16-bit training. Where there is less, new parameters alone are computed
// ahead, which takes 2, and the states are updated behind the step ([Note: parameters first], engine/update_jobs.h). So
// it is where clipping acts, and 16-bit parameters are then computed for all factors near the last one ([Note: settled
// values], optim/kernels.h): the step makes those again that differ among these. Where a chunk's masters are split and
// its gradient has memory of its own, new parameters take the old ones' place and none is needed but for values that
// are open ([Note: values in place], optim/kernels.h); what cancels such an update writes the old ones again.
//
//   expect(groups, scales)         before a backward
//   start(chunk, update, ...)      its gradient is complete
//   begin_step(groups, grad_scale) true when they are among the expected ones
//   take(chunk)                    its new values; or cancel(chunk)
//
// Where memory does not allow all chunks, those that the next forward needs first are chosen: the others' updates have
// time to run beside it. Where expectations fail, only parameters are computed ahead until they hold again, since that
// is less to do for nothing; where they fail again and again, speculation pauses.
// Guarded by the engine's lock.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "common/types.h"
#include "engine/open_memory.h"
#include "engine/scale_forecast.h"
#include "engine/update_jobs.h"
#include "engine/update_states.h"
#include "memory/host_arena.h"
#include "plan/host_demand.h"
#include "plan/recipe.h"

namespace patrickstar {

enum class SpeculationMode : uint8_t {
  kOff,     // updates start when the step does
  kOn,      // before, where memory allows it; taken back when the step turns out otherwise
  kCommit,  // before, in place, for good: the caller promises that the step will be the expected one
};

class Speculation {
 public:
  // `reserve_bytes` of host memory are left to everybody else.
  Speculation(int num_chunks, UpdateStates& states, HostArena& arena, HostUpdates& updates, Backend& backend,
              SpeculationMode mode, int64_t reserve_bytes);
  ~Speculation();

  void expect(std::vector<GroupOptions> groups, ScaleBounds scales);
  bool is_committing() const { return mode_ == SpeculationMode::kCommit; }
  bool commits() const { return is_committing() && !groups_.empty(); }
  const std::vector<GroupOptions>& expected_groups() const { return groups_; }
  const ScaleBounds& expected_scales() const { return scales_; }

  // Chooses the chunks for which host memory suffices, in the order of the next forward, and has the memory prepared.
  // `sizes` by chunk.
  void choose(const Layout& layout, const std::vector<NewBytes>& sizes);
  bool must_choose() const { return is_on() && chosen_.empty() && backwards_to_wait_ == 0; }
  // The next choice is made anew: other chunks have their states on the host.
  void forget_choice();
  // So much more is left to others than what always is; where that is more than before, the next choice is made anew.
  void leave(int64_t num_bytes);
  // True in a backward whose step is expected.
  bool is_active() const { return active_; }
  // True while expectations that failed, or a shortage of memory, keep updates from starting.
  bool is_paused() const { return backwards_to_wait_ > 0; }
  // How much of the chunk's update there is memory for.
  Ahead ahead(ChunkId chunk) const { return allows_passes() ? chosen_[static_cast<size_t>(chunk)] : Ahead::kNothing; }

  // Whether memory may be used to compute parameters first. Only after choose(): before, what is free may be meant for
  // states that are still to be made.
  bool allows_passes() const { return is_on() && !chosen_.empty(); }
  // Memory for the new parameters of a chunk: an empty block when there is none, or not yet.
  HostBlock try_allocate_param(int64_t num_bytes);
  // Memory for as many of a chunk's new values as are to be computed ahead; the same.
  NewValues try_allocate(const NewBytes& size, Passes passes);
  void start(ChunkId chunk, HostUpdate update, NewValues values);
  // Before a backward, when chunks were chosen: memory for values that are open, where there are any.
  void prepare_open();
  bool has_open_memory() const { return !open_.is_empty(); }
  int64_t num_values_in_place() const { return open_.num_in_place(); }
  // Where open values of these jobs, a chunk's, are kept.
  void keep_open(ChunkId chunk, std::vector<optim::UpdateJob>& jobs) { open_.keep(chunk, jobs); }
  void begin_open(ChunkId chunk, std::vector<optim::UpdateJob>& jobs) { open_.begin(chunk, jobs); }
  bool has(ChunkId chunk) const { return states_.is(chunk, UpdateState::kAhead); }

  bool begin_step(const std::vector<GroupOptions>& groups, double grad_scale);
  // New values that were started for the chunk, which is to be said to be made first (UpdateStates). They stay until
  // take().
  const NewValues& pending(ChunkId chunk) const { return pending_[static_cast<size_t>(chunk)].values; }
  NewValues take(ChunkId chunk);
  // Drops what was started; returns when nothing of it runs any more.
  void cancel(ChunkId chunk);
  void cancel_all();
  // Frees `block` once `after` is complete.
  void free_after(HostBlock block, const Event& after) noexcept;
  // Those of completed ones.
  void free_completed();
  // Waits until the next of those blocks is free. False: there is none.
  bool await_free();
  // Gives back all host memory that speculation holds, for others need it. What is left is chosen from anew some
  // backwards later.
  void release_memory();

 private:
  bool is_on() const { return mode_ == SpeculationMode::kOn; }
  struct Pending {
    NewValues values;
    std::shared_ptr<std::atomic<bool>> cancelled;
  };
  // Of host memory, beside what is left to others.
  int64_t room_bytes() const { return arena_.free_bytes() - reserve_bytes_ - left_bytes_; }
  bool allows(int64_t num_bytes) const { return num_bytes <= room_bytes(); }
  // Blocks that are freed when what reads them is complete.
  int64_t leaving_bytes() const;
  void reserve(std::vector<int64_t> blocks);
  void free_open();
  // Returns when the parameters are the old ones again.
  void take_back(NewValues values);

  UpdateStates& states_;
  HostArena& arena_;
  HostUpdates& updates_;
  Backend& backend_;
  SpeculationMode mode_;
  int64_t reserve_bytes_;
  int64_t left_bytes_ = 0;        // to others beside that, since the last choice was forgotten
  std::vector<Pending> pending_;  // by chunk
  std::vector<Ahead> chosen_;     // by chunk
  int64_t chosen_numel_ = 0;      // of these
  int64_t apart_bytes_ = 0;       // of their new parameters that have memory of their own
  bool any_in_place_ = false;
  OpenMemory open_;
  std::vector<std::pair<Event, HostBlock>> leaving_;
  std::vector<GroupOptions> groups_;
  ScaleBounds scales_;
  bool active_ = false;
  int failures_ = 0;       // in a row
  int num_shortages_ = 0;  // when others needed its memory
  int backwards_to_wait_ = 0;
};

}  // namespace patrickstar
