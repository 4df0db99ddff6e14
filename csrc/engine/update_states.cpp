#include "engine/update_states.h"

#include "common/check.h"

namespace patrickstar {

namespace {

bool may_follow(UpdateState from, UpdateState to) {
  switch (from) {
    case UpdateState::kIdle:
      return to != UpdateState::kIdle;
    case UpdateState::kAhead:
      return to == UpdateState::kIdle || to == UpdateState::kStatesBehind || to == UpdateState::kMade;
    case UpdateState::kBegun:
    case UpdateState::kStatesBehind:
      return to == UpdateState::kMade;
    case UpdateState::kMade:
      return false;
  }
  return false;
}

}  // namespace

void UpdateStates::move(ChunkId chunk, UpdateState to) {
  UpdateState& state = states_[static_cast<size_t>(chunk)];
  PS_CHECK(may_follow(state, to), StateError, "the update of chunk ", chunk, " goes from state ",
           static_cast<int>(state), " to ", static_cast<int>(to), "; this is a bug");
  const bool was_made = is_made(chunk);
  state = to;
  num_made_ += is_made(chunk) && !was_made ? 1 : 0;
}

void UpdateStates::end_step() {
  for (UpdateState& state : states_) {
    if (state != UpdateState::kAhead) state = UpdateState::kIdle;
  }
  num_made_ = 0;
}

}  // namespace patrickstar
