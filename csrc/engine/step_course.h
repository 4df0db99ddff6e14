// The course of a step. Each call has a rule (engine/runtime_calls.h).
//
//   begin_forward  open_scope/touch/close_scope ...  end_forward
//   begin_backward enter_backward/accumulate ...           end_backward
//   sum_of_squares apply_step or skip_step
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
  kUntracked,  // evaluation: on demand, not recorded
};

void begin_forward(OpenEngine& open, Tracking tracking, Attempt attempt);
void end_forward(OpenEngine& open);
// The forward ran out of device memory and will be repeated. Its activations are gone.
void undo_forward(OpenEngine& open);
// An exception left the forward: releases what it held. Gradients of earlier backwards stay.
void abort_forward(OpenEngine& open);

// `expected_groups` and `expected_grad_scale`: those of the step that follows; empty if unknown.
void begin_backward(OpenEngine& open, const std::vector<GroupOptions>& expected_groups, double expected_grad_scale);
void end_backward(OpenEngine& open);
// After the backward of another engine's loss (patrickstar/session/joint_backward.py): true if it gave this engine
// gradients. Otherwise the backward is not counted; if nothing is trained, the step ends.
bool keep_joint_backward(OpenEngine& open);
// An exception left the backward: releases what it held and forgets its gradients. Returns the number of chunks with
// committed updates (`UpdateStart::kCommitted`).
int abort_backward(OpenEngine& open);
// Within a forward or a backward, before ranks wait for each other outside of the engine: serves other ranks' requests
// until all have arrived. A replay needs no such wait.
void meet_ranks(OpenEngine& open);

// Moves chunks to the host until at most `keep_bytes` are on the device, and lifts the device's limit. Returns the
// bytes that stay (Pager::shrink_to).
int64_t lend_device(OpenEngine& open, int64_t keep_bytes);
// Restores the limit. Chunks come back as they are used, or by Residency::return_states().
void take_device_back(OpenEngine& open);

// Sum of squares of the gradients, except those of `left_out`, which other ranks own as well and count.
double sum_of_squares(OpenEngine& open, std::vector<ParamId> left_out);
// After sum_of_squares: GradientFlow::squares_of_parts.
double squares_of_parts(OpenEngine& open, std::vector<ParamId> left_out);
// If these throw, they may be repeated with the same arguments, as the step's state says.
void apply_step(OpenEngine& open, const std::vector<GroupOptions>& groups, double grad_scale, double clip_ratio);
void skip_step(OpenEngine& open);
// Gives up a failed step and its gradients. Values then stem from several steps.
void drop_step(OpenEngine& open);
void clear_gradients(OpenEngine& open);

// Before the first step: adopts the timeline of an earlier run with the same layout, and its `times` if it was
// measured. The first step then replays a plan, and fetches on demand after a plan miss. All ranks must call it.
void adopt_timeline(OpenEngine& open, Timeline timeline, std::optional<StepTimes> times);
struct StepSoFar {
  Timeline timeline;
  StepTimes times;                    // without updates
  std::vector<double> stall_seconds;  // by access: waits, beside `times`
};
// The running step up to its optimizer's step, which begins now. Nothing if TraceReader::kChoice did not ask for it.
std::optional<StepSoFar> step_so_far(OpenEngine& open);
// Between backward and apply_step: states are placed, and the next step planned, for `expected`. All ranks must call
// it; times must be the same on all.
void expect_step(OpenEngine& open, ExpectedStep expected);
// Trains frozen parameters from now on, in chunks that have states. All ranks must call it, between the same forwards.
void train(OpenEngine& open, const std::vector<ParamId>& params);

}  // namespace patrickstar
