#include "engine/step_state.h"

#include "common/check.h"

namespace patrickstar {

namespace {

constexpr StepStates next_states(StepState state) {
  switch (state) {
    case StepState::kReady:
    case StepState::kGradients:
      return {StepState::kReady,    StepState::kGradients, StepState::kForward, StepState::kEvaluation,
              StepState::kBackward, StepState::kUpdating,  StepState::kTorn,    StepState::kEnding};
    case StepState::kForward:
    case StepState::kEvaluation:
    case StepState::kBackward:
      return {StepState::kReady, StepState::kGradients};
    case StepState::kUpdating:
      return {StepState::kReady, StepState::kUpdating, StepState::kTorn, StepState::kEnding};
    case StepState::kTorn:
      return {StepState::kReady};
    case StepState::kEnding:
      return {StepState::kReady, StepState::kEnding};
  }
  return {};
}

}  // namespace

const char* state_text(StepState state) {
  switch (state) {
    case StepState::kReady:
      return "between steps";
    case StepState::kGradients:
      return "while gradients wait for the step";
    case StepState::kForward:
      return "within a forward";
    case StepState::kEvaluation:
      return "within an evaluation";
    case StepState::kBackward:
      return "within a backward";
    case StepState::kUpdating:
      return "after a step that has failed in part";
    case StepState::kTorn:
      return "after a step that has failed in the middle of an update";
    case StepState::kEnding:
      return "after a step that has failed at its end";
  }
  return "in no state";
}

bool Step::is_running() const { return is_recorded() || is(StepState::kEvaluation); }

void Step::move(StepState to) {
  PS_CHECK(next_states(state_).has(to), StateError, "a step cannot come ", state_text(to), " from ",
           state_text(state_));
  const bool was_running = is_running();
  if (!was_running) before_ = state_;
  state_ = to;
}

void Step::go_back() {
  if (is_running()) state_ = before_;
}

}  // namespace patrickstar
