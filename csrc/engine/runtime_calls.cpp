#include "engine/runtime_calls.h"

#include "common/check.h"

namespace patrickstar {

namespace {

enum class Order : uint8_t { kAny, kAfterCompute };

// Effect of a call on held parameters.
enum class Holds : uint8_t {
  kStay,
  kTransientEnd,  // releases holds of the user's own accesses
  kAllEnd,        // releases all; complete chunks finalise
  kAbandoned,     // releases all; no chunk finalises
};

// How a call treats committed updates: of optimizer-in-backward, or of a step that failed in part.
enum class Committed : uint8_t {
  kStay,
  kRefuse,        // throws if there are any
  kRefuseChunks,  // throws if the call's chunks are among them
  kForgotten,
};

// Effect of a call on speculative updates.
enum class Early : uint8_t {
  kStay,
  kValuesRestored,  // in-place updates are rolled back
  kCancelled,
};

struct Rule {
  StepStates states;
  const char* what;  // subject of the error message
  Order order = Order::kAfterCompute;
  Holds holds = Holds::kStay;
  Committed committed = Committed::kStay;
  Early early = Early::kStay;
};

using S = StepState;
constexpr StepStates kAnyState{S::kReady,    S::kGradients, S::kForward, S::kEvaluation,
                               S::kBackward, S::kUpdating,  S::kTorn,    S::kEnding};
constexpr StepStates kNotRunning{S::kReady, S::kGradients, S::kUpdating, S::kTorn, S::kEnding};
constexpr StepStates kBetweenCalls{S::kReady, S::kGradients};
constexpr StepStates kStepStates{S::kReady, S::kGradients, S::kUpdating, S::kEnding};
constexpr StepStates kRunning{S::kForward, S::kEvaluation, S::kBackward};

Rule rule_of(Call call) {
  using O = Order;
  using H = Holds;
  using C = Committed;
  using E = Early;
  switch (call) {
    case Call::kInspect:
      return {kAnyState, "the engine was asked", O::kAny};
    case Call::kDevice:
      return {kAnyState, "device memory was asked for"};
    case Call::kLendDevice:
      return {kBetweenCalls, "device memory was to be lent or filled", O::kAfterCompute, H::kTransientEnd};
    case Call::kReadValues:
      return {kAnyState, "values were to be read", O::kAfterCompute, H::kStay, C::kStay, E::kValuesRestored};
    case Call::kWriteValues:
      return {kAnyState, "values were to be written", O::kAfterCompute, H::kTransientEnd, C::kStay, E::kCancelled};
    case Call::kGiveUpValues:
      return {kAnyState, "values were to be given up", O::kAfterCompute, H::kAbandoned, C::kForgotten, E::kCancelled};
    case Call::kChangeChunks:
      return {kNotRunning, "chunks were to change", O::kAfterCompute, H::kTransientEnd};
    case Call::kGradients:
      return {kAnyState, "a gradient was to be read or written", O::kAfterCompute, H::kStay, C::kRefuse};
    case Call::kBeginForward:
      return {kBetweenCalls, "a forward was to begin", O::kAfterCompute, H::kTransientEnd,
              C::kStay,      E::kValuesRestored};
    case Call::kEndForward:
      return {{S::kForward, S::kEvaluation}, "a forward was to end", O::kAfterCompute, H::kAllEnd};
    case Call::kUndoForward:
      return {kAnyState, "a forward was to be undone", O::kAfterCompute, H::kAllEnd};
    case Call::kUse:
      return {kAnyState,         "a parameter was to be used", O::kAfterCompute, H::kStay, C::kRefuseChunks,
              E::kValuesRestored};
    case Call::kBeginBackward:
      return {kBetweenCalls, "a second backward", O::kAfterCompute, H::kTransientEnd, C::kRefuse, E::kValuesRestored};
    case Call::kAccumulate:
      return {kAnyState, "a gradient came"};
    case Call::kEndBackward:
      return {{S::kBackward}, "a backward was to end", O::kAfterCompute, H::kAllEnd};
    case Call::kAbort:
      return {kAnyState, "a call was to be abandoned", O::kAny, H::kAbandoned};
    case Call::kSumGradients:
      return {kStepStates, "the norm of gradients was asked for", O::kAfterCompute, H::kAllEnd};
    case Call::kApplyStep:
      return {kStepStates, "a step"};
    case Call::kSkipStep:
      return {{S::kReady, S::kGradients, S::kEnding}, "a skipped step", O::kAfterCompute, H::kStay, C::kRefuse};
    case Call::kDropStep:
      return {kNotRunning, "a step was to be dropped"};
    case Call::kClearGradients:
      return {kNotRunning, "gradients were to be forgotten", O::kAny, H::kStay, C::kRefuse};
  }
  return {kAnyState, "the engine was called"};
}

const char* remedy(StepState state) {
  if (kRunning.has(state)) return "; call it when that is over";
  if (state == StepState::kTorn) return "; load a checkpoint";
  return kBetweenCalls.has(state) ? "; none is running" : "; call optimizer.step() again, or load a checkpoint";
}

void check_committed(const OpenEngine& open, const Rule& rule, const CallChunks& chunks) {
  if (rule.committed == Committed::kRefuse) open.updates.check_nothing_committed(rule.what);
  if (rule.committed == Committed::kRefuseChunks && chunks.params != nullptr) {
    open.updates.check_not_committed(*chunks.params);
  }
}

void end_holds(OpenEngine& open, Holds holds) {
  switch (holds) {
    case Holds::kStay:
      return;
    case Holds::kTransientEnd:
      return open.tracker.release_transient();
    case Holds::kAllEnd:
      return open.tracker.release_all();
    case Holds::kAbandoned:
      return open.tracker.abandon_all();
  }
}

void restore_values(OpenEngine& open, const CallChunks& chunks) {
  if (chunks.params != nullptr) return open.updates.restore_values(*chunks.params);
  if (chunks.chunk >= 0) return open.updates.restore_values(chunks.chunk);
  open.updates.restore_values();
}

void cancel(OpenEngine& open, const CallChunks& chunks, const char* what) {
  if (chunks.chunk >= 0) return open.updates.cancel(chunks.chunk);
  open.updates.check_nothing_committed(what);
  open.updates.cancel_all();
}

}  // namespace

void begin_call(OpenEngine& open, Call call, const CallChunks& chunks) {
  const Rule rule = rule_of(call);
  const StepState state = open.step.state();
  PS_CHECK(rule.states.has(state), StateError, rule.what, " ", state_text(state), remedy(state));
  if (rule.order == Order::kAfterCompute) open.backend().follow_compute();
  check_committed(open, rule, chunks);
  end_holds(open, rule.holds);
  if (rule.committed == Committed::kForgotten) open.updates.forget_committed();
  if (rule.early == Early::kValuesRestored) restore_values(open, chunks);
  if (rule.early == Early::kCancelled) cancel(open, chunks, rule.what);
}

}  // namespace patrickstar
