// The state machine of parameters, and the state of a chunk that follows from it.
//
//   FREE            no value anywhere in compute form (it can be derived from the master)
//   COMPUTE         an open module or backward operation uses it: its chunk stays on the device
//   HOLD            has a value, no use is open
//   HOLD_AFTER_FWD  its forward use is over
//   HOLD_AFTER_BWD  its backward is over: the value is dead until the optimizer has run, so the
//                   gradient may take its place
//
// A chunk's state is the highest of its parameters' in the order COMPUTE, HOLD, HOLD_AFTER_FWD,
// HOLD_AFTER_BWD, FREE; RELEASED is a chunk whose payload is on another rank. Legal moves stand in one
// table; an illegal one throws StateError. Owned by the chunk store; guarded by the runtime's lock.
#pragma once

#include <array>
#include <cstdint>

namespace patrickstar {

enum class State : uint8_t { kFree, kHoldAfterBwd, kHoldAfterFwd, kHold, kCompute, kReleased };
constexpr int kNumParamStates = 5;  // all but kReleased

const char* state_name(State state);

// Throws StateError when the table has no move from `from` to `to`. `subject` names the parameter.
void check_transition(State from, State to, const char* subject);

// Counts the parameters of one chunk by state.
class StateCounts {
 public:
  explicit StateCounts(int num_params) { counts_[static_cast<int>(State::kFree)] = num_params; }

  void move(State from, State to) {
    --counts_[static_cast<int>(from)];
    ++counts_[static_cast<int>(to)];
  }
  int count(State state) const { return counts_[static_cast<int>(state)]; }
  State chunk_state() const;

 private:
  std::array<int, kNumParamStates> counts_{};
};

}  // namespace patrickstar
