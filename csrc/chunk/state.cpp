#include "chunk/state.h"

#include "common/check.h"

namespace patrickstar {

namespace {

constexpr bool kMayMove[kNumParamStates][kNumParamStates] = {
    // to: FREE  AFTER_BWD  AFTER_FWD  HOLD   COMPUTE        from:
    {false, true, false, true, true},  // FREE: an unused parameter's backward ends; the optimizer writes it; it is used
    {true, true, false, true,
     true},  // HOLD_AFTER_BWD: dropped for the gradient; a second gradient; step; next micro-batch
    {true, true, true, true, true},   // HOLD_AFTER_FWD: dropped (derivable); end of backward; used again
    {true, true, false, true, true},  // HOLD
    {false, true, true, true, true},  // COMPUTE: nested uses; never dropped while in use
};

}  // namespace

const char* state_name(State state) {
  switch (state) {
    case State::kFree:
      return "FREE";
    case State::kHoldAfterBwd:
      return "HOLD_AFTER_BWD";
    case State::kHoldAfterFwd:
      return "HOLD_AFTER_FWD";
    case State::kHold:
      return "HOLD";
    case State::kCompute:
      return "COMPUTE";
    case State::kReleased:
      return "RELEASED";
  }
  return "?";
}

void check_transition(State from, State to, const char* subject) {
  const bool known = from != State::kReleased && to != State::kReleased;
  PS_CHECK(known && kMayMove[static_cast<int>(from)][static_cast<int>(to)], StateError, subject, " cannot go from ",
           state_name(from), " to ", state_name(to), "; this is a defect of PatrickStar, please report it");
}

State StateCounts::chunk_state() const {
  for (State state : {State::kCompute, State::kHold, State::kHoldAfterFwd, State::kHoldAfterBwd}) {
    if (count(state) > 0) return state;
  }
  return State::kFree;
}

}  // namespace patrickstar
