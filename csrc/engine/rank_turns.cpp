#include "engine/rank_turns.h"

#include <algorithm>
#include <optional>
#include <string>

#include "collective/message.h"
#include "common/check.h"

namespace patrickstar {

void RankTurns::begin_forward(CallSharing sharing) {
  sharing_ = sharing;
  begin_phase(Phase::kForward);
}

void RankTurns::begin_backward() { begin_phase(Phase::kBackward); }

void RankTurns::begin_step() {
  paths_.begin_step();
  pager_.restart_replay();
}

// A rank that makes another call must be found here: the others would wait for its collectives.
void RankTurns::begin_phase(Phase phase) {
  if (!pager_.replays()) return;
  PlanReplay& replay = pager_.replay();
  collectives_.exchange("its beginning, after " + std::to_string(replay.num_phases()) + " forwards and backwards", {});
  if (replay.begin_phase(phase)) return;
  const Branch here{replay.num_phases(), replay.position() + 1};
  const int choice = paths_.choice_of_phase(here, phase);
  if (choice != StepPaths::kNone) take(here, {choice});
  if (!replay.begin_phase(phase)) pager_.leave_plan();
}

void RankTurns::follow_plan(Phase phase, const std::vector<ArrayId>& acquired) {
  if (!pager_.replays()) return;
  PlanReplay& replay = pager_.replay();
  const auto is_there = [this](ArrayId id) { return !pager_.needs_gather(id); };
  const bool all_there = std::all_of(acquired.begin(), acquired.end(), is_there);
  for (;;) {
    const PlanReplay::Position place = replay.find(phase, acquired, all_there);
    const bool advances = place.fit != PlanReplay::Fit::kBetween;
    const std::optional<int64_t> branch = paths_.next_branch(planned_phase());
    if (branch == replay.position() + 1) {
      const int choice = paths_.choice_of_access(planned_phase(), phase, acquired);
      if (choice != StepPaths::kNone || advances) {
        take_branch(choice);
        continue;
      }
    }
    if (!advances) return;
    const bool leaves = place.fit == PlanReplay::Fit::kNone;
    const int64_t end = leaves ? replay.phase_end() : place.access;
    if (branch && *branch <= end) {
      skip_until(*branch);
      continue;
    }
    if (leaves) return leave_plan(phase);
    skip_until(end);
    return gradients_.scatter_due();
  }
}

void RankTurns::take_branch(int choice) {
  constexpr const char* kWhat = "which path the model takes";
  gradients_.scatter_due();
  const Branch here{planned_phase(), *paths_.next_branch(planned_phase())};
  std::vector<int> choices;
  for (const std::string& message : collectives_.exchange(kWhat, MessageWriter().add(choice).str())) {
    MessageReader reader(message, kWhat);
    choices.push_back(reader.next<int>());
    reader.finish();
    reader.check(choices.back() >= StepPaths::kNone && choices.back() < paths_.size(), "no path");
  }
  take(here, choices);
}

void RankTurns::take(Branch at, const std::vector<int>& choices) {
  if (!paths_.take(at, choices)) return;
  pager_.switch_to(paths_.current());
  updates_.follow(paths_.current().recipes);
}

void RankTurns::skip_until(int64_t end) {
  while (pager_.replay().position() + 1 < end) {
    gradients_.scatter_due();
    pager_.skip_access();
  }
}

void RankTurns::finish_planned_phase() {
  while (const std::optional<int64_t> branch = paths_.next_branch(planned_phase())) {
    skip_until(*branch);
    take_branch(paths_.choice_of_end(planned_phase()));
  }
  skip_until(pager_.replay().phase_end());
  gradients_.scatter_due();
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
  const bool replayed = pager_.replays();
  if (replayed) finish_planned_phase();
  if (!has_others()) return true;
  if (replayed) {
    const bool varied = pager_.replay().course() == PlanReplay::Course::kVarying;
    if (all_stay(varied ? ForwardEnd::kLeavesPlan : ForwardEnd::kStays)) return true;
  }
  finish_phase();
  return !replayed;
}

void RankTurns::undo_forward() {
  if (has_others() && pager_.replays()) {
    finish_planned_phase();
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
  if (pager_.replays()) finish_planned_phase();
  if (!has_others()) return;
  if (pager_.replays()) {
    if (gradients_.scatter_rest(BackwardEnd::kComplete)) return;
    pager_.leave_plan();
  }
  finish_phase();
  gradients_.scatter_rest(BackwardEnd::kComplete);
}

bool RankTurns::may_plan_after(StepAgreement::Ways ways) {
  if (ways == StepAgreement::Ways::kApart && sharing_ == CallSharing::kShared) shared_calls_vary_ = true;
  return !shared_calls_vary_;
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
