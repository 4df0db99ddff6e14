// Takes turns with the other ranks where no plan says whose chunk is next ([Note: the same order on every rank]): does
// what a round of negotiation has decided, whether this rank needs it or not.
//
// [Note: a forward run again] While ranks replay a plan, the others gather what it says and nothing once more. So a
// rank whose forward ran out of memory first takes its part in what the plan has left of that forward, without
// computing. Then, as at the end of each forward of a replay, the ranks tell each other how theirs went. Where one
// failed, all leave the plan until the step is over: it makes its forward again, and the others take turns with it.
//
// Guarded by the engine's lock.
#pragma once

#include "engine/collectives.h"
#include "engine/gradient_flow.h"
#include "engine/pager.h"

namespace patrickstar {

class RankTurns {
 public:
  RankTurns(Pager& pager, Recorder& recorder, GradientFlow& gradients, Collectives& collectives)
      : pager_(pager), recorder_(recorder), gradients_(gradients), collectives_(collectives) {}

  // Returns when the chunk's gather is enqueued.
  void need(ChunkId chunk);
  // The forward or backward is over here: returns when it is over on all ranks.
  void finish_phase();

  // [Note: a forward run again]. Whether one that fails now can be.
  bool can_repeat_forward() const;
  // A forward of training that came through is over on all ranks. False when they have left the plan for one that
  // failed.
  bool finish_forward();
  // One that failed here, and will be made again.
  void undo_forward();

 private:
  // Whether all did; if not, the plan has been left.
  bool all_came_through(bool mine);
  // What was gathered; RankRound::kNone when all ranks' phases are over.
  ChunkId take_turn(ChunkId needed);

  Pager& pager_;
  Recorder& recorder_;
  GradientFlow& gradients_;
  Collectives& collectives_;
};

}  // namespace patrickstar
