// Updates of chunks, each where its optimizer states are, in the optimizer's step or before it.
//
// When a chunk's gradient is complete (engine/gradient_flow.h), start_early() may begin its update: a final one
// (optimizer-in-backward) or a speculative one (engine/early_updates.h). The step updates the remaining chunks.
//
// Hyperparameters come per parameter group in every step. Step counts are per parameter, as in torch.optim: without a
// gradient the parameter and its count stay. New compute values take the gradients' memory, on the tier of the update.
//
// Updates on the host continue after apply() has returned, in the order in which the next forward needs the chunks. If
// there is memory for it they are two-phase ([Note: two-phase updates], engine/update_jobs.h), with phase two in the
// order of the next backward. Host buffers carry the event of their update. Guarded by the engine's lock.
#pragma once

#include <cstdint>
#include <vector>

#include "common/ablation.h"
#include "engine/chunk_updates.h"
#include "engine/early_updates.h"
#include "engine/gradients.h"
#include "engine/pager.h"
#include "engine/round_trips.h"
#include "engine/scale_forecast.h"
#include "engine/speculation.h"
#include "engine/update_arrays.h"
#include "engine/update_jobs.h"
#include "plan/ops.h"
#include "plan/recipe.h"

namespace patrickstar {

class Updates {
 public:
  // `disk_updates`: the queue of chunks whose states are on the disk, so that other updates never wait for the disk.
  Updates(Pager& pager, const Gradients& gradients, MatrixUpdates& matrices, HostUpdates& host_updates,
          HostUpdates& disk_updates, Speculation& speculation, UpdateStates& states);

  // Before a backward: the expected options of the next step, so that updates on the host may start. `full_scale`: the
  // factor on gradients without clipping.
  void expect(const std::vector<GroupOptions>& groups, double full_scale);
  // Recipe of an update that may begin now. Allocates the device memory of round trips if necessary.
  Recipe early_recipe(ChunkId chunk);
  // Carries out the plan's instruction: starts an update in backward. The chunk's gradient must be complete, and on the
  // update's tier or on its way there.
  void start_early(Op op, ChunkId chunk);
  // Chooses the chunks whose updates may start early, unless chosen already. Call it after all states are made.
  void choose_speculation();
  bool must_choose_speculation() const { return speculation_.must_choose(); }
  // Leaves `num_bytes` of host memory for gradients of chunks whose states are on the device. Chooses again if that is
  // more than before.
  void leave_to_gradients(int64_t num_bytes) { speculation_.leave(num_bytes); }
  // After backward: prefetches gradients that left the device for updates there, as far as it has room. The norm is
  // computed meanwhile.
  void fetch_gradients();
  // There are more states, so the choice starts over.
  void forget_choice() { speculation_.forget_choice(); }
  // Throws StateError if committed updates exist that such a step would not make.
  void check_step(const std::vector<GroupOptions>& groups, double grad_scale) const;
  // `groups[group_of[param]]`: the options of `param`. Gradients are multiplied by `grad_scale` first. If it throws, it
  // may be repeated with the same arguments; updated chunks are then skipped (`UpdateStates`).
  void apply(const std::vector<GroupOptions>& groups, double grad_scale, double clip_ratio);

  // Recipes of a plan, by chunk; empty: the earliest possible ones. Round trips go in pieces of `piece_numel` elements,
  // whole kStateBlocks.
  void follow(std::vector<Recipe> recipes, int64_t piece_numel = kRoundTripPiece);
  // False if no update may be a round trip (engine/round_trips.h).
  bool may_round_trip() const {
    return speculation_.is_committing() && matrices_.is_empty() && !is_left_out(Mechanism::kRoundTrips);
  }
  // The earliest start of updates on the host in a step of one backward.
  UpdateStart earliest_start() const {
    return speculation_.commits() ? UpdateStart::kCommitted : UpdateStart::kSpeculative;
  }
  // Gradient scale that speculative updates of this step assume.
  ExpectedScale expected_scale() const;
  // The same of the next step, if `clip_ratio` is this step's.
  ExpectedScale next_scale(double clip_ratio) const;
  // The chunk's recipe from step to step: not before `start`, and as early as memory allows.
  Recipe earliest(ChunkId chunk, UpdateStart start) const;

  void set_group(ParamId param, int group) { jobs_.set_group(param, group); }
  int64_t step_count(ParamId param) const { return jobs_.step_count(param); }
  void set_step_count(ParamId param, int64_t count);
  // Rolls back a speculative update: its inputs are about to change, or it is not wanted. Throws StateError if the
  // update is final.
  void cancel(ChunkId chunk);
  // With UpdateStart::kCommitted (optimizer-in-backward), a chunk is updated in place as soon as its gradient is
  // complete, also on the device. The gradient need not wait for the step. Such updates are final, so any call that
  // would change the step is refused until apply().
  //
  // Throws StateError if there are committed updates; `what`: the refused call.
  void check_nothing_committed(const char* what) const;
  // check_nothing_committed() for a use of these parameters, whose values may be those of the next step.
  void check_not_committed(const std::vector<ParamId>& params) const;
  int num_committed() const { return states_.num_made(); }
  // True if a launch failed: a chunk is neither the old nor the new one.
  bool is_torn() const { return states_.any(UpdateState::kBegun); }
  void forget_committed();
  // A failed step is given up, and all values with it.
  void drop_step();
  void cancel_all() {
    held_back_ = -1;
    early_.cancel_all();
  }
  // Rolls back in-place updates before the old values are read: of these parameters' chunks, of one chunk, or of all.
  void restore_values(const std::vector<ParamId>& params) { early_.restore_values(params); }
  void restore_values(ChunkId chunk) { early_.restore_values(chunk); }
  void restore_values() { early_.restore_values(); }
  void release_host_memory() { speculation_.release_memory(); }
  void release_device_memory() { chunk_updates_.round_trips().leave_room(); }

 private:
  // Deferred updates: chunks that wait for the norm, by the tier of their states.
  struct DeferredUpdates {
    std::vector<ChunkId> on_host;
    std::vector<ChunkId> on_disk;
  };

  UpdateUnit unit_of(ChunkId chunk) const {
    return matrices_.has_any(chunk) ? UpdateUnit::kMatrix : UpdateUnit::kElement;
  }
  Recipe recipe(ChunkId chunk) const;
  // Phases of a chunk that is updated after the norm, whenever its update was to begin.
  Passes passes_after_norm(ChunkId chunk) const;
  // True if updates are computed for a range of factors. In float32 nearly all values are scale-dependent, so only the
  // factor without clipping is expected.
  bool settles_values() const;
  void choose_chunks();
  void apply_to_all(const std::vector<GroupOptions>& groups, float grad_scale, bool as_expected);
  void apply_deferred(const DeferredUpdates& late, const std::vector<GroupOptions>& groups, float grad_scale);
  void commit(Op op, ChunkId chunk);
  const char* how_committed() const;
  void note_made(const UpdateWay& way);
  void submit_what_is_left() noexcept;

  Pager& pager_;
  ChunkMemory& memory_;
  ChunkStore& store_;
  const Gradients& gradients_;
  const MatrixUpdates& matrices_;
  DiskStates& disk_;
  Speculation& speculation_;
  UpdateArrays arrays_;
  UpdateJobs jobs_;
  UpdateStates& states_;
  EarlyUpdates early_;
  ChunkUpdates chunk_updates_;
  ScaleForecast forecast_;
  std::vector<Recipe> planned_;  // by chunk; empty without a plan
  // With several ranks, an update on the device waits until the next gradient is complete. Its reduce-scatter is then
  // over, and compute does not stall. -1: none.
  ChunkId held_back_ = -1;
};

}  // namespace patrickstar
