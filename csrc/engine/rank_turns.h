// Takes turns with the other ranks where no plan says whose chunk is next ([Note: the same order on every rank]): does what
// a round of negotiation has decided, whether this rank needs it or not. Guarded by the engine's lock.
#pragma once

#include "engine/collectives.h"
#include "engine/gradient_flow.h"
#include "engine/pager.h"

namespace patrickstar {

class RankTurns {
 public:
  RankTurns(Pager& pager, GradientFlow& gradients, Collectives& collectives)
      : pager_(pager), gradients_(gradients), collectives_(collectives) {}

  // Returns when the chunk's gather is enqueued.
  void need(ChunkId chunk);
  // The forward or backward is over here: returns when it is over on all ranks.
  void finish_phase();

 private:
  // What was gathered; RankRound::kNone when all ranks' phases are over.
  ChunkId take_turn(ChunkId needed);

  Pager& pager_;
  GradientFlow& gradients_;
  Collectives& collectives_;
};

}  // namespace patrickstar
