#include "engine/rank_turns.h"

#include "common/check.h"

namespace patrickstar {

void RankTurns::begin_forward(CallSharing sharing) {
  sharing_ = sharing;
  begin_phase(Phase::kForward);
}

void RankTurns::begin_backward() { begin_phase(Phase::kBackward); }

// A rank that makes another call must be found here: the others would wait for its collectives.
void RankTurns::begin_phase(Phase phase) {
  if (!has_others() || !pager_.replays()) return;
  collectives_.exchange("its beginning", {});
  if (!pager_.replay().begin_phase(phase, pager_.layout())) pager_.leave_plan();
}

void RankTurns::follow_plan(Phase phase, const std::vector<ArrayId>& acquired) {
  if (!has_others() || !pager_.replays()) return;
  bool is_there = true;
  for (ArrayId id : acquired) is_there = is_there && !pager_.needs_gather(id);
  const PlanReplay::Position place = pager_.replay().find(phase, acquired, is_there);
  switch (place.fit) {
    case PlanReplay::Fit::kNext:
    case PlanReplay::Fit::kLater:
      skip_until(place.access);
      gradients_.scatter_due();
      break;
    case PlanReplay::Fit::kBetween:
      break;
    case PlanReplay::Fit::kNone:
      leave_plan(phase);
      break;
  }
}

void RankTurns::skip_until(int64_t end) {
  while (pager_.replay().position() + 1 < end) {
    gradients_.scatter_due();
    pager_.skip_access();
  }
}

void RankTurns::leave_plan(Phase phase) {
  PS_CHECK(
      sharing_ == CallSharing::kOwn, StateError,
      "in the middle of a call that ranks share (sequence_parallel, tensor_parallel), the model of this rank needs "
      "parameters that it did not need before, and the others cannot be asked for them there; let ranks that share "
      "calls go the same way through the model, or train without sharing them");
  skip_until(pager_.replay().phase_end());
  gradients_.scatter_due();
  if (phase == Phase::kForward) {
    all_stay(ForwardEnd::kLeavesPlan);
  } else {
    gradients_.scatter_rest(BackwardEnd::kLeavesPlan);
    pager_.leave_plan();
  }
}

void RankTurns::need(ChunkId chunk) {
  ++pager_.memory().counters().num_on_demand_fetches;
  while (take_turn(chunk) != chunk) {
  }
}

void RankTurns::finish_phase() {
  while (take_turn(ChunkRequest::kPhaseOver) != RankRound::kNone) {
  }
}

bool RankTurns::finish_forward() {
  if (!has_others()) return true;
  const bool replayed = pager_.replays();
  if (replayed) {
    skip_until(pager_.replay().phase_end());
    const bool varied = pager_.replay().course() == PlanReplay::Course::kVarying;
    if (all_stay(varied ? ForwardEnd::kLeavesPlan : ForwardEnd::kStays)) return true;
  }
  finish_phase();
  return !replayed;
}

void RankTurns::undo_forward() {
  if (has_others() && pager_.replays()) {
    skip_until(pager_.replay().phase_end());
    all_stay(ForwardEnd::kLeavesPlan);
  } else {
    pager_.leave_plan();
  }
}

bool RankTurns::all_stay(ForwardEnd mine) {
  if (collectives_.all_stay(mine)) return true;
  pager_.leave_plan();
  return false;
}

void RankTurns::finish_backward() {
  if (!has_others()) return;
  if (pager_.replays()) {
    skip_until(pager_.replay().phase_end());
    gradients_.scatter_due();
    if (gradients_.scatter_rest(BackwardEnd::kComplete)) return;
    pager_.leave_plan();
  }
  finish_phase();
  gradients_.scatter_rest(BackwardEnd::kComplete);
}

bool RankTurns::may_plan_after(StepAgreement::Ways ways) {
  const bool apart = ways == StepAgreement::Ways::kApart;
  if (apart && sharing_ == CallSharing::kShared) shared_calls_vary_ = true;
  return !apart && !shared_calls_vary_;
}

ChunkId RankTurns::take_turn(ChunkId needed) {
  const RankRound round = collectives_.negotiate({needed, gradients_.complete_here()}, pager_.store().num_chunks());
  for (ChunkId chunk : round.complete) {
    gradients_.forget_complete(chunk);
    gradients_.scatter(chunk);
  }
  pager_.gather_postponed();
  if (round.needed != RankRound::kNone) pager_.gather(round.needed);
  return round.needed;
}

}  // namespace patrickstar
