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

bool RankTurns::can_repeat_forward() const {
  return !pager_.layout().is_sharded() || !pager_.is_replaying() || recorder_.expected_forward_end().has_value();
}

bool RankTurns::finish_forward() {
  if (!pager_.layout().is_sharded()) return true;
  const bool replayed = pager_.replays();
  if (replayed && (!recorder_.expected_forward_end().has_value() || all_came_through(true))) return true;
  finish_phase();
  return !replayed;
}

void RankTurns::undo_forward() {
  if (pager_.layout().is_sharded() && pager_.is_replaying()) {
    pager_.replay_until(*recorder_.expected_forward_end());
    all_came_through(false);
  } else {
    pager_.leave_plan();
  }
}

bool RankTurns::all_came_through(bool mine) {
  static const std::string kFailed = "it ran out of memory";
  for (const std::string& theirs : collectives_.exchange("how the forward went", mine ? "" : kFailed)) {
    if (theirs != kFailed) continue;
    pager_.leave_plan();
    return false;
  }
  return true;
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
