// State of an engine's step:
//
//   kReady       no gradients wait
//   kGradients   gradients wait for the optimizer's step, or for another backward
//   kForward     in a forward that autograd records
//   kEvaluation  in a forward that autograd does not record
//   kBackward    in a backward
//   kUpdating    a step failed after updating some chunks; repeating the call finishes it
//   kTorn        a step failed in the middle of a chunk; only a checkpoint restores the values
//   kEnding      a step failed after updating all chunks, or was skipped; repeating the call finishes it
//
// A failed forward or backward returns to the state before it. Guarded by the engine's lock.
#pragma once

#include <cstdint>
#include <initializer_list>

namespace patrickstar {

enum class StepState : uint8_t {
  kReady,
  kGradients,
  kForward,
  kEvaluation,
  kBackward,
  kUpdating,
  kTorn,
  kEnding,
};

const char* state_text(StepState state);

class StepStates {
 public:
  constexpr StepStates(std::initializer_list<StepState> states) {
    for (StepState state : states) bits_ |= bit(state);
  }
  constexpr bool has(StepState state) const { return (bits_ & bit(state)) != 0; }

 private:
  static constexpr uint32_t bit(StepState state) { return uint32_t{1} << static_cast<uint32_t>(state); }
  uint32_t bits_ = 0;
};

class Step {
 public:
  StepState state() const { return state_; }
  bool is(StepState state) const { return state_ == state; }
  // True in a forward or a backward, also of an evaluation.
  bool is_running() const;
  // True if uses of parameters are recorded and follow a plan.
  bool is_recorded() const { return is(StepState::kForward) || is(StepState::kBackward); }

  // Throws StateError if the table has no such transition.
  void move(StepState to);
  // Returns to the state before the running forward or backward; does nothing if none runs.
  void go_back();

 private:
  StepState state_ = StepState::kReady;
  StepState before_ = StepState::kReady;  // the running forward or backward
};

}  // namespace patrickstar
