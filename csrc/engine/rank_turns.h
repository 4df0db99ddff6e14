// Keeps this rank in step with the others that share its chunks ([Note: the same order on every rank]).
//
// [Note: ranks in a plan] While ranks replay a plan, each of them enqueues the plan's all-gathers and reduce-scatters,
// and no others, in the plan's order, whatever its own model uses (engine/plan_replay.h):
//
//   a planned moment that the model leaves out   is taken part in, before a later one or at the end of the phase
//   a chunk that the plan does not bring here    the rank takes its part in the rest of the phase, then asks for it
//   a planned reduce-scatter                     has the gradients that are there; later ones are added by another one
//
// At the end of each phase all ranks tell each other how theirs went, in one exchange. Where one needs more than the
// plan gives, or its forward varied so that its backward may come in another order, all leave the plan until the step
// is over, and take turns. So no rank waits for a collective that another one does not enqueue.
//
// [Note: a forward run again] A forward that ran out of memory is such a case: the rank takes its part in what the plan
// has left of it without computing, and makes the forward again when all have left the plan.
//
// Without a plan, ranks take turns: each says in a round what it needs, and all do what the round has decided.
//
// Guarded by the engine's lock.
#pragma once

#include <vector>

#include "engine/collectives.h"
#include "engine/gradient_flow.h"
#include "engine/pager.h"

namespace patrickstar {

// How a call of the module concerns other ranks beyond their chunks.
enum class CallSharing : uint8_t {
  kOwn,     // each rank's calls are its own
  kShared,  // ranks wait for each other in the middle of a call (shared sequences or matrices)
};

class RankTurns {
 public:
  RankTurns(Pager& pager, GradientFlow& gradients, Collectives& collectives)
      : pager_(pager), gradients_(gradients), collectives_(collectives) {}

  // Both throw RankMismatch where another rank makes another call.
  void begin_forward(CallSharing sharing);
  void begin_backward();
  // A moment is about to begin: brings the plan to it, or has all ranks leave the plan. Throws StateError where calls
  // are shared and the rank would have to leave the plan in the middle of one.
  void follow_plan(Phase phase, const std::vector<ArrayId>& acquired);

  // Without a plan: returns when the chunk's all-gather is enqueued.
  void need(ChunkId chunk);
  // Without a plan: the forward or backward is over here; returns when it is over on all ranks.
  void finish_phase();

  // A forward of training came through. Returns when it is over on all ranks; false when they have left the plan.
  bool finish_forward();
  // A forward that failed here, and will be made again.
  void undo_forward();
  // The gradients of all ranks are all ranks' when it returns.
  void finish_backward();
  // Whether the step after one in which ranks went such ways may have a plan; the same on all ranks. Where calls are
  // shared, none has from the first one on in which they went apart, since nobody could leave it in the middle of a
  // call.
  bool may_plan_after(StepAgreement::Ways ways);

 private:
  bool has_others() const { return pager_.layout().has_other_ranks(); }
  void begin_phase(Phase phase);
  // This rank's part in the planned moments up to the `end`-th, and in the reduce-scatters before that.
  void skip_until(int64_t end);
  void leave_plan(Phase phase);
  // Whether all ranks stay in the plan; if not, it has been left.
  bool all_stay(ForwardEnd mine);
  // What was gathered; RankRound::kNone when all ranks' phases are over.
  ChunkId take_turn(ChunkId needed);

  Pager& pager_;
  GradientFlow& gradients_;
  Collectives& collectives_;
  CallSharing sharing_ = CallSharing::kOwn;
  bool shared_calls_vary_ = false;
};

}  // namespace patrickstar
