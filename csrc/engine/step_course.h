// The course of a step, in calls of which each has its rule (engine/runtime_calls.h):
//
//   begin_forward  open_scope/touch/close_scope ...  end_forward
//   begin_backward enter_backward/fold ...           end_backward
//   prepare_step   apply_step or skip_step
//
// Guarded by the engine's lock.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "engine/open_engine.h"

namespace patrickstar {

enum class Tracking : uint8_t {
  kTraining,   // recorded, replayed, held for backward
  kUntracked,  // evaluation: on demand, leaves the trace alone
};

// Forward.
// `attempt`: whether it is the first one, and whether the caller makes another one when it runs out of device memory.
void begin_forward(OpenEngine& open, Tracking tracking, Attempt attempt);
void end_forward(OpenEngine& open);
// The forward ran out of device memory and will be made again: as if it had not begun. Its activations are gone.
void undo_forward(OpenEngine& open);
// An exception left the forward: what it held is released. Gradients of earlier backwards stay.
void abort_forward(OpenEngine& open);

// Backward.
// With the options and the factor on gradients that the step after it is expected to get (none: not known).
void begin_backward(OpenEngine& open, const std::vector<GroupOptions>& expected_groups, double expected_grad_scale);
void end_backward(OpenEngine& open);
// The last backward was that of another engine's loss ([Note: joint backward], patrickstar/engine/joint_backward.py):
// whether it gave this one gradients. If not, it counts for nothing; where nothing is trained it ends the step.
bool keep_joint_backward(OpenEngine& open);
// An exception left the backward: what it held is released, its gradients are forgotten. Returns how many chunks it
// had updated for good ([Note: committed updates]).
int abort_backward(OpenEngine& open);
// Within a forward or a backward, at a point where all ranks come to wait for each other by other means than the
// engine's: returns when they have, each served with what it needed on the way. In a replay nobody has to be waited
// for.
void meet_ranks(OpenEngine& open);

// Step.
// The gradients' sum of squares, but for those of `left_out`, which ranks beyond these have too and count.
double prepare_step(OpenEngine& open, std::vector<ParamId> left_out);
// Where these throw they may be called again, with the same, as the step's state says.
void apply_step(OpenEngine& open, const std::vector<GroupOptions>& groups, double grad_scale, double clip_ratio);
void skip_step(OpenEngine& open);
// A step that has failed is given up with its gradients; values are as they are, of several steps.
void drop_step(OpenEngine& open);
void clear_gradients(OpenEngine& open);

// Before the first step: it will go as `timeline`, of an earlier run of the same layout, says, and take `times`, if
// that run was measured. The first step then replays a plan; where it departs from it, it fetches on demand as any
// step does. With several ranks all must be here.
void adopt_timeline(OpenEngine& open, Timeline timeline, std::optional<StepTimes> times);
// Parameters that were frozen are trained from now on, in chunks that have states. With several ranks all must call it,
// between the same forwards.
void train(OpenEngine& open, const std::vector<ParamId>& params);

}  // namespace patrickstar
