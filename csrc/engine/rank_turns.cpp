#include "engine/rank_turns.h"

namespace patrickstar {

void RankTurns::need(ChunkId chunk) {
  ++pager_.memory().counters().num_on_demand_fetches;
  while (take_turn(chunk) != chunk) {
  }
}

void RankTurns::finish_phase() {
  while (take_turn(ChunkRequest::kPhaseOver) != RankRound::kNone) {
  }
}

ChunkId RankTurns::take_turn(ChunkId needed) {
  const RankRound round = collectives_.negotiate({needed, gradients_.complete_here()}, pager_.store().num_chunks());
  for (ChunkId chunk : round.complete) {
    gradients_.forget_complete(chunk);
    gradients_.scatter(chunk);
  }
  if (round.needed != RankRound::kNone) pager_.gather(round.needed);
  return round.needed;
}

}  // namespace patrickstar
