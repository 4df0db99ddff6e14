// Updates of chunks by Adam, each where its optimizer states are: in the optimizer's step, or ahead of it.
//
// A chunk's gradient is complete (engine/gradient_flow.h): start_early() begins its update where that is wanted, for
// good ([Note: committed updates]) or so that it can be taken back (engine/early_updates.h). The step then updates the
// rest.
//
// Hyperparameters come per parameter group at every step (so schedulers work); step counts are kept per parameter, as
// torch.optim keeps them: a parameter without a gradient is left alone and its count stays. The new compute values take
// the gradients' place, on the tier of the update. Updates on the host run on after apply() has returned, in the order
// in which the next forward needs the chunks; where there is memory for it, new parameters first and states behind
// ([Note: parameters first], engine/update_jobs.h), these in the order in which the next backward needs them. Blocks
// are marked with the event of their update. Guarded by the engine's lock.
#pragma once

#include <cstdint>
#include <vector>

#include "common/ablation.h"
#include "engine/chunk_updates.h"
#include "engine/early_updates.h"
#include "engine/gradients.h"
#include "engine/pager.h"
#include "engine/scale_forecast.h"
#include "engine/speculation.h"
#include "engine/update_arrays.h"
#include "engine/update_jobs.h"
#include "engine/visits.h"
#include "plan/ops.h"
#include "plan/recipe.h"

namespace patrickstar {

class Updates {
 public:
  // `disk_updates`: the queue of those of chunks whose states are on the disk, so that the others' do not wait for it.
  Updates(Pager& pager, const Gradients& gradients, MatrixUpdates& matrices, HostUpdates& host_updates,
          HostUpdates& disk_updates, Speculation& speculation, UpdateStates& states);

  // Before a backward: what the step after it is expected to get. Updates on the host may start then.
  // `full_scale`: of gradients, where clipping does not act.
  void expect(const std::vector<GroupOptions>& groups, double full_scale);
  // Recipe of an update that may begin now. Takes the memory that visits need, where it is not there yet.
  Recipe early_recipe(ChunkId chunk);
  // The chunk's gradient is complete and where its update is, or on its way there: carries out the instruction, an
  // update that begins in backward.
  void start_early(Op op, ChunkId chunk);
  // Decides which chunks' updates may start then, unless that is decided: to be called when all states have been made.
  void choose_speculation();
  bool must_choose_speculation() const { return speculation_.must_choose(); }
  // Of host memory, what gradients of chunks with their states on the device will take: it is left to them. Where that
  // is more than before, it is decided anew.
  void leave_to_gradients(int64_t num_bytes) { speculation_.leave(num_bytes); }
  // Backward is over: gradients that left the device begin to come back for their updates there, as far as it has room,
  // while the norm is computed.
  void fetch_gradients();
  // The choice is made anew, since there are more states.
  void forget_choice() { speculation_.forget_choice(); }
  // Throws StateError where updates were committed that such a step would not make.
  void check_step(const std::vector<GroupOptions>& groups, double grad_scale) const;
  // groups[group_of[param]] are the options of `param`; gradients are multiplied by `grad_scale` first. Where it throws
  // it can be called again, with the same ([Note: all or nothing], engine/update_states.h): chunks that were updated
  // are left alone.
  void apply(const std::vector<GroupOptions>& groups, double grad_scale, double clip_ratio);

  // Recipes of a plan, by chunk; none: the earliest ones. Chunks that visit do so in pieces of `piece_numel`, whole
  // kStateBlocks.
  void follow(std::vector<Recipe> recipes, int64_t piece_numel = kVisitingPiece);
  // False where no update may be made by a visit ([Note: visits], engine/visits.h).
  bool may_visit() const {
    return speculation_.is_committing() && matrices_.is_empty() && !is_left_out(Mechanism::kVisits);
  }
  // The earliest start of updates on the host in a step of one backward.
  UpdateStart earliest_start() const {
    return speculation_.commits() ? UpdateStart::kCommitted : UpdateStart::kSpeculative;
  }
  // The chunk's recipe from step to step: not before `start`, and as early as there is memory for it.
  Recipe earliest(ChunkId chunk, UpdateStart start) const;

  void set_group(ParamId param, int group) { jobs_.set_group(param, group); }
  int64_t step_count(ParamId param) const { return jobs_.step_count(param); }
  void set_step_count(ParamId param, int64_t count);
  // Inputs of a running update are about to change, or it is not wanted any more. Throws StateError when it is for
  // good.
  void cancel(ChunkId chunk);
  // [Note: committed updates] With SpeculationMode::kCommit a chunk is updated in place as soon as its gradient is
  // complete, on the device as well: its gradient need not wait there for the step. Nothing takes that back, so
  // everything that would make the step another one is refused until apply().
  // Throws StateError when there are such updates; `what` says what was about to happen.
  void check_nothing_committed(const char* what) const;
  // The same for a use of these parameters, whose values are those of the next step by now.
  void check_not_committed(const std::vector<ParamId>& params) const;
  int num_committed() const { return states_.num_made(); }
  // An update has begun and not been made: its chunk is neither the old nor the new one.
  bool is_torn() const { return states_.any(UpdateState::kBegun); }
  void forget_committed();
  // A step that has failed is given up, and all values with it.
  void drop_step();
  void cancel_all() {
    held_back_ = -1;
    early_.cancel_all();
  }
  // Old values that new ones have taken the place of are to be read: of these parameters, of one chunk, or all.
  void restore_values(const std::vector<ParamId>& params) { early_.restore_values(params); }
  void restore_values(ChunkId chunk) { early_.restore_values(chunk); }
  void restore_values() { early_.restore_values(); }
  void release_host_memory() { speculation_.release_memory(); }
  void release_device_memory() { chunk_updates_.visits().leave_room(); }

 private:
  // Chunks whose updates wait for the norm, by where their states are.
  struct LateUpdates {
    std::vector<ChunkId> on_host;
    std::vector<ChunkId> on_disk;
  };

  UpdateUnit unit_of(ChunkId chunk) const {
    return matrices_.has_any(chunk) ? UpdateUnit::kMatrix : UpdateUnit::kElement;
  }
  // The plan's recipe, or a later one where it cannot be followed.
  Recipe recipe(ChunkId chunk) const;
  // Passes of a chunk that is updated after the norm, whenever its update was to begin.
  Passes passes_after_norm(ChunkId chunk) const;
  // In 32 bits nearly no value is settled: those of the scale where clipping does not act are computed ahead, or none.
  bool settles_values() const;
  void choose_chunks();
  void apply_to_all(const std::vector<GroupOptions>& groups, float grad_scale, bool as_expected);
  void apply_late(const LateUpdates& late, const std::vector<GroupOptions>& groups, float grad_scale);
  void commit(Op op, ChunkId chunk);
  const char* how_committed() const;
  // The report counts it.
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
  std::vector<Recipe> planned_;  // by chunk; none without a plan
  // With several ranks an update on the device is held back until the next gradient is complete: its scatter is over
  // then, and compute need not wait. -1: none.
  ChunkId held_back_ = -1;
};

}  // namespace patrickstar
