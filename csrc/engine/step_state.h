// State of an engine's step, as one value with a table of transitions.
//
//   kReady       no gradients wait
//   kGradients   gradients wait for the optimizer's step, or for another backward
//   kForward     in a forward that autograd records
//   kEvaluation  in a forward that it does not record
//   kBackward    in a backward
//   kUpdating    a step has failed when some chunks were updated; the same call finishes it
//   kTorn        a step has failed in the middle of a chunk; a checkpoint helps
//   kEnding      a step has failed when all chunks were updated, or it was skipped; the same call finishes it
//
// A forward or a backward that fails goes back to the state before it. Guarded by the engine's lock.
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
  // In a forward or a backward, which may be an evaluation's.
  bool is_running() const;
  // In one whose uses of parameters are recorded and follow a plan.
  bool is_recorded() const { return is(StepState::kForward) || is(StepState::kBackward); }

  // Throws StateError where the table has no such transition.
  void move(StepState to);
  // The forward or backward that runs is over without effect. Nothing where none runs.
  void go_back();

 private:
  StepState state_ = StepState::kReady;
  StepState before_ = StepState::kReady;  // the forward or backward that runs
};

}  // namespace patrickstar
