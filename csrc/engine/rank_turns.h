// [Note: ranks in a plan] While ranks replay a plan, each enqueues the plan's all-gathers and reduce-scatters and no
// others, in the plan's order. Its own model may use other arrays (engine/plan_replay.h):
//
//   a planned access that the model leaves out   the rank takes its part, before a later one or at the end of the phase
//   a chunk that the plan does not bring here    the rank takes its part in the rest of the phase, then requests it
//   a planned reduce-scatter                     sends the gradients that exist; another one adds later gradients
//
// Where other kept paths branch off, each rank first says which path its model takes, and all follow the longest one
// (engine/step_paths.h).
//
// At the end of each phase, ranks exchange how it went. All of them leave the plan until the end of the step in two
// cases: a rank needs more than the plan gives, or its forward varied, so that its backward may use another order. They
// continue in turns. So no rank waits for a collective that another one does not enqueue.
//
// A forward that ran out of memory is such a case. The rank takes its part in the rest of the planned forward without
// computing, and repeats the forward after all ranks have left the plan.
//
// Without a plan, ranks take turns in rounds ([Note: the same order on every rank], engine/collectives.h).
//
// Guarded by the engine's lock.
#pragma once

#include <vector>

#include "engine/collectives.h"
#include "engine/gradient_flow.h"
#include "engine/pager.h"
#include "engine/step_paths.h"
#include "engine/updates.h"

namespace patrickstar {

// How a call of the module depends on other ranks, beyond shared chunks.
enum class CallSharing : uint8_t {
  kOwn,     // independent of other ranks' calls
  kShared,  // ranks wait for each other within a call (sequence or tensor parallelism)
};

class RankTurns {
 public:
  RankTurns(Pager& pager, Updates& updates, GradientFlow& gradients, Collectives& collectives, StepPaths& paths)
      : pager_(pager), updates_(updates), gradients_(gradients), collectives_(collectives), paths_(paths) {}

  // A step begins. It follows the first path's plan, if there is one.
  void begin_step();

  // Both throw RankMismatch if another rank makes another call.
  void begin_forward(CallSharing sharing);
  void begin_backward();
  // Before an access: chooses a path, and advances its plan to the access or makes all ranks leave the plan. Throws
  // StateError if calls are shared and the rank would have to leave the plan within one.
  void follow_plan(Phase phase, const std::vector<ArrayId>& acquired);

  // Without a plan: returns when the chunk's all-gather is enqueued.
  void need(ChunkId chunk);
  // Without a plan: the phase is over here; returns when it is over on all ranks.
  void finish_phase();

  // A training forward succeeded. Returns when it is over on all ranks; false if they have left the plan.
  bool finish_forward();
  // A forward failed here and will be repeated.
  void undo_forward();
  // All ranks' gradients are enqueued for reduce-scatters when it returns.
  void finish_backward();
  // True if the step after one with such an agreement may have a plan; the same on all ranks. If calls are shared,
  // plans end for good when ranks first take different paths, since no rank could leave a plan within a call.
  bool may_plan_after(StepAgreement::Ways ways);

 private:
  bool has_others() const { return pager_.layout().has_other_ranks(); }
  void begin_phase(Phase phase);
  // This rank's part in the planned accesses up to the `end`-th, and in the reduce-scatters before it.
  void skip_until(int64_t end);
  void finish_planned_phase();
  size_t planned_phase() const { return pager_.replay().num_phases() - 1; }
  // At the next branch of this phase. `choice`: this rank's path (StepPaths).
  void take_branch(int choice);
  void take(Branch at, const std::vector<int>& choices);
  void leave_plan(Phase phase);
  // True if all ranks stay in the plan; otherwise it has been left.
  bool all_stay(ForwardEnd mine);
  // The chunk that was all-gathered; RankRound::kNone when all ranks' phases are over.
  ChunkId take_turn(ChunkId needed);

  Pager& pager_;
  Updates& updates_;
  GradientFlow& gradients_;
  Collectives& collectives_;
  StepPaths& paths_;
  CallSharing sharing_ = CallSharing::kOwn;
  bool shared_calls_vary_ = false;
};

}  // namespace patrickstar
