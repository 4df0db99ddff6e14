#include "engine/step_course.h"

#include <algorithm>
#include <utility>

#include "common/check.h"
#include "common/sizes.h"
#include "engine/state_placing.h"
#include "plan/step_measurement.h"
#include "plan/timeline_merge.h"

namespace patrickstar {

namespace {

void forget_running_step(OpenEngine& open) {
  open.expected.reset();
  open.pager.replay().end_step();
  open.recorder.abandon_step();
  open.memory.tracer().abandon();
}

LimitPolicy policy_between_calls(const OpenEngine& open) {
  return open.placing != StatesPlacing::kFirst ? LimitPolicy::kEnforce : LimitPolicy::kMeasure;
}

// After an exception in a forward or a backward, whose holds are abandoned.
void abandon_call(OpenEngine& open) {
  open.step.go_back();
  open.flow.forget_complete();
  open.backend().set_limit_policy(policy_between_calls(open));
  forget_running_step(open);
}

// Nothing is trained, so no optimizer step ends a step of this engine.
bool is_frozen(const Layout& layout) {
  const auto& chunks = layout.chunks();
  return std::none_of(chunks.begin(), chunks.end(), [](const ChunkSpec& chunk) { return chunk.trainable; });
}

// The timeline with each activation memory raised to `activation_levels`.
Timeline with_activation_levels(Timeline timeline, const std::vector<int64_t>& activation_levels) {
  for (size_t t = 0; t < activation_levels.size(); ++t) {
    int64_t& peak = timeline.accesses[t].activation_peak_bytes;
    peak = std::max(peak, activation_levels[t]);
  }
  return timeline;
}

int64_t largest_whole_chunk_bytes(const Layout& layout) {
  int64_t most = 0;
  for (ChunkId chunk = 0; chunk < layout.num_chunks(); ++chunk) {
    most = std::max(most, layout.num_bytes({chunk, ArrayKind::kParam}));
  }
  return most;
}

// An error that asks for a larger budget must name enough memory. So on the simulated device, excess allocations pass
// (LimitPolicy::kMeasure) if the call cannot be repeated with an emptier device. Once the peak is known, this check
// refuses the call on all ranks, before any update.
void check_least_limit(OpenEngine& open, const char* what, const char* first_remedies) {
  if (!open.backend().may_exceed_limit()) return;
  int64_t least = open.backend().least_limit_bytes();
  if (open.layout().has_other_ranks()) least = open.collectives->max_over_ranks(least);
  const int64_t limit = open.options.device.device_limit_bytes;
  if (least <= limit) return;
  if (open.layout().has_other_ranks())
    least += largest_whole_chunk_bytes(open.layout());  // all-gathered before its use, as a plan may do
  if (least >= open.options.ample_limit_bytes) least += open.options.ample_extra_bytes;
  open.backend().reset_least_limit();
  PS_CHECK(false, MemoryBudgetError, "device_memory is ", show_exactly(limit), ", but ", what, " needs ",
           show_exactly(least), " at its peak even with every idle chunk evicted; ", first_remedies,
           ", raise device_memory to at least ", show_enough(least), ", or lower default_chunk_size",
           open.updates.num_committed() > 0 ? "" : ". Nothing was updated");
}

void leave_to_gradients(OpenEngine& open) {
  open.updates.leave_to_gradients(open.residency.leaving_gradient_bytes(open.recorder.last()));
}

void choose_speculation(OpenEngine& open) {
  if (open.updates.must_choose_speculation()) leave_to_gradients(open);
  open.updates.choose_speculation();
}

// Gradients are used up, and values are live again.
void end_gradients(OpenEngine& open) {
  open.flow.clear();
  for (ParamId param = 0; param < open.layout().num_params(); ++param) {
    const bool exists = open.memory.store().array({open.layout().placement(param).chunk, ArrayKind::kParam}).exists();
    if (open.memory.store().param_state(param) != State::kFree || exists)
      open.memory.store().move_param(param, exists ? State::kHold : State::kFree);
  }
}

// After a step in which ranks took different paths: a path that all can follow, also those who follow the last plan.
Timeline path_of_all(OpenEngine& open, bool any_access) {
  const Timeline all =
      open.collectives->merge(any_access ? open.recorder.last() : Timeline(), open.layout().num_chunks());
  return open.pager.replay().has_plan() ? merged(all, open.pager.replay().path().timeline) : all;
}

void finish_step(OpenEngine& open, StepOutcome outcome) {
  end_gradients(open);
  // With several ranks, one without accesses still takes part in all decisions.
  const bool any_access = open.recorder.position() >= 0;
  if (!any_access && !open.layout().has_other_ranks()) return open.memory.tracer().abandon();
  const bool first = open.placing == StatesPlacing::kFirst;
  const PlanReplay::Course course = open.pager.replay().course();
  const bool is_exact = any_access && (!open.pager.replays() || course == PlanReplay::Course::kExact);
  std::vector<int64_t> planned_activation_levels = open.pager.replay().activation_levels();
  std::vector<int64_t>* const followed = open.pager.replays() ? &planned_activation_levels : nullptr;
  open.pager.replay().end_step();
  // The optimizer's own accesses are not counted: no activations live then, and on CUDA its device buffers for
  // optimizer states would count as activation memory.
  open.recorder.finish_step();
  const std::optional<ExpectedStep> expected = std::exchange(open.expected, std::nullopt);
  if (expected) open.recorder.set_last(expected->timeline);
  if (first) {
    open.placing = StatesPlacing::kDone;
    open.backend().set_limit_policy(LimitPolicy::kEnforce);
    open.updates.forget_choice();  // chosen before parameters were unfrozen
    choose_speculation(open);
  }
  Timeline last = open.recorder.last();
  const PlanVote mine = open.planner.vote(is_exact ? StepWay::kAsRecorded : StepWay::kAsBefore);
  const StepAgreement agreement = open.collectives->agree_on(last, followed, packed(mine));
  std::vector<PlanVote> votes;
  for (const std::string& note : agreement.notes) {
    votes.push_back(unpacked_vote(note, static_cast<size_t>(open.layout().num_chunks())));
  }
  const PlanVote all = agreed(votes);
  if (agreement.ways == StepAgreement::Ways::kAsPlanned && !expected)
    last = with_activation_levels(open.pager.replay().path().timeline, planned_activation_levels);
  if (agreement.ways == StepAgreement::Ways::kApart) last = path_of_all(open, any_access);
  open.recorder.set_last(std::move(last));
  is_exact ? open.memory.tracer().end_step(open.recorder.last(), outcome) : open.memory.tracer().abandon();
  open.pager.limit_chunk_buffers(open.residency.chunk_buffer_limit(open.recorder.last()));
  if (!open.turns.may_plan_after(agreement.ways)) return open.planner.forget_plan();  // the same on all ranks
  const bool holds = open.planner.end_step(all);
  if (expected && expected->times) open.planner.adopt(expected->times);
  if (!holds) leave_to_gradients(open);  // activation memory may have risen
  if (holds && open.residency.leave_to_device(open.pager.plan())) open.updates.forget_choice();
}

void settle(OpenEngine& open) { open.step.move(open.flow.pending() ? StepState::kGradients : StepState::kReady); }

}  // namespace

void begin_forward(OpenEngine& open, Tracking tracking, Attempt attempt) {
  open.disk.check();
  if (tracking == Tracking::kTraining && is_frozen(open.layout())) forget_running_step(open);
  if (open.recorder.position() < 0) open.backend().reset_least_limit();
  open.step.move(tracking == Tracking::kTraining ? StepState::kForward : StepState::kEvaluation);
  const bool first = attempt == Attempt::kFirst || attempt == Attempt::kOnly;
  const bool begins_step = open.recorder.position() < 0 && !open.pager.replays();
  if (tracking == Tracking::kTraining && begins_step && first) {
    open.device->take_activation_peak(open.pager);
    open.turns.begin_step();
    open.memory.arena().release_reused();
    open.memory.arena().prepare_ahead();  // for momentum and variance, during the first step
    open.planner.begin_step();
    open.memory.tracer().begin_step();
  }
  if (!first) open.device->take_activation_peak(open.pager);
  if (!first && begins_step && tracking == Tracking::kTraining) open.memory.tracer().begin_step();  // undone before
  if (tracking == Tracking::kTraining) {
    open.recorder.begin_forward();
    open.turns.begin_forward(attempt == Attempt::kOnly ? CallSharing::kShared : CallSharing::kOwn);
  }
  // With a plan of several ranks, chunks can make room through the host: the missing memory is measured.
  const bool has_plan = open.pager.replay().course() != PlanReplay::Course::kNone;
  const bool last =
      attempt == Attempt::kLast || attempt == Attempt::kOnly || (open.layout().has_other_ranks() && has_plan);
  open.backend().set_limit_policy(last ? LimitPolicy::kMeasure : policy_between_calls(open));
}

void end_forward(OpenEngine& open) {
  const bool training = open.step.is(StepState::kForward);
  if (training) {
    if (!open.turns.finish_forward()) open.memory.tracer().abandon();
    open.recorder.end_phase();
  } else if (open.layout().has_other_ranks()) {
    open.turns.finish_phase();
  }
  open.step.go_back();
  open.backend().set_limit_policy(training ? LimitPolicy::kMeasure : policy_between_calls(open));
  if (!training) check_least_limit(open, "this forward pass", kSmallerBatch);
}

void undo_forward(OpenEngine& open) {
  open.backend().reclaim();
  if (open.step.is(StepState::kForward)) {
    open.turns.undo_forward();
    open.recorder.undo_forward();
    open.memory.tracer().abandon();
  }
  open.step.go_back();
}

void abort_forward(OpenEngine& open) { abandon_call(open); }

void begin_backward(OpenEngine& open, const std::vector<GroupOptions>& expected_groups, double expected_grad_scale) {
  open.updates.expect(expected_groups, expected_grad_scale);
  if (!open.flow.pending()) {
    choose_speculation(open);
    open.disk.expect_updates();
  }
  open.step.move(StepState::kBackward);
  open.backend().set_limit_policy(LimitPolicy::kMeasure);
  try {
    open.turns.begin_backward();
    open.flow.begin_backward();
  } catch (...) {
    open.tracker.abandon_all();
    abandon_call(open);
    throw;
  }
}

void end_backward(OpenEngine& open) {
  open.flow.complete_backward();
  open.turns.finish_backward();
  open.recorder.end_phase();
  open.updates.fetch_gradients();
  open.step.move(StepState::kGradients);
  open.backend().set_limit_policy(policy_between_calls(open));
  check_least_limit(open, "this step", kCheckpointOrSmallerBatch);
}

bool keep_joint_backward(OpenEngine& open) {
  if (open.flow.keep_backward()) return true;
  if (is_frozen(open.layout())) {
    open.recorder.note_activations(open.pager.activation_memory_of_running_access());
    finish_step(open, StepOutcome::kSkipped);
  }
  settle(open);
  return false;
}

int abort_backward(OpenEngine& open) {
  abandon_call(open);
  const int num_committed = open.updates.num_committed() + (open.updates.is_torn() ? 1 : 0);
  open.updates.forget_committed();
  open.updates.cancel_all();
  open.flow.abort_backward();
  settle(open);
  open.disk.expect_nothing();
  return num_committed;
}

void meet_ranks(OpenEngine& open) {
  const bool is_planned = open.pager.replays() && open.step.is_recorded();
  if (open.layout().has_other_ranks() && !is_planned) open.turns.finish_phase();
}

int64_t lend_device(OpenEngine& open, int64_t keep_bytes) {
  open.updates.release_device_memory();
  const int64_t left = open.pager.shrink_to(keep_bytes);
  open.backend().set_limit_policy(LimitPolicy::kLifted);
  return left;
}

void take_device_back(OpenEngine& open) { open.backend().set_limit_policy(policy_between_calls(open)); }

double sum_of_squares(OpenEngine& open, std::vector<ParamId> left_out) {
  std::sort(left_out.begin(), left_out.end());
  open.memory.tracer().begin_optimizer();
  const double sum = open.flow.sum_of_squares(left_out);
  open.recorder.note_activations(open.pager.activation_memory_of_running_access());
  return sum;
}

double squares_of_parts(OpenEngine& open, std::vector<ParamId> left_out) {
  std::sort(left_out.begin(), left_out.end());
  return open.flow.squares_of_parts(left_out);
}

void apply_step(OpenEngine& open, const std::vector<GroupOptions>& groups, double grad_scale, double clip_ratio) {
  const bool is_new = !open.step.is(StepState::kUpdating) && !open.step.is(StepState::kEnding);
  if (is_new) {
    open.updates.check_step(groups, grad_scale);
    place_before_updates(open);
  }
  if (!open.step.is(StepState::kEnding)) {
    try {
      open.updates.apply(groups, grad_scale, clip_ratio);
    } catch (...) {
      if (open.updates.is_torn()) {
        open.step.move(StepState::kTorn);
      } else if (open.updates.num_committed() > 0) {
        open.step.move(StepState::kUpdating);
      }
      throw;
    }
    open.updates.forget_committed();
    ++open.memory.counters().num_steps;
    open.step.move(StepState::kEnding);
  }
  finish_step(open, StepOutcome::kApplied);
  open.step.move(StepState::kReady);
}

void skip_step(OpenEngine& open) {
  if (!open.step.is(StepState::kEnding)) {
    place_before_updates(open);
    open.updates.cancel_all();
    ++open.memory.counters().num_skipped_steps;
    open.step.move(StepState::kEnding);
  }
  finish_step(open, StepOutcome::kSkipped);
  open.step.move(StepState::kReady);
}

void drop_step(OpenEngine& open) {
  open.step.move(StepState::kReady);
  open.updates.drop_step();
  end_gradients(open);
  open.disk.expect_nothing();
  forget_running_step(open);
}

void clear_gradients(OpenEngine& open) {
  if (!open.flow.pending()) return;
  open.updates.cancel_all();
  open.flow.clear();
  open.step.move(StepState::kReady);
  open.disk.expect_nothing();
  forget_running_step(open);
}

void adopt_timeline(OpenEngine& open, Timeline timeline, std::optional<StepTimes> times) {
  PS_CHECK(open.placing == StatesPlacing::kFirst && open.recorder.position() < 0, StateError,
           "a plan is adopted before the first step only");
  open.recorder.set_last(std::move(timeline));
  open.residency.place_in_headroom(open.recorder.last());
  open.planner.adopt(std::move(times));
}

std::optional<StepSoFar> step_so_far(OpenEngine& open) {
  open.recorder.note_activations(open.pager.activation_memory_of_running_access());
  const std::optional<StepTrace> trace = open.traces.take_until_optimizer(TraceReader::kChoice);
  const Timeline& running = open.recorder.running();
  if (!trace || trace->accesses.size() != running.accesses.size()) return std::nullopt;
  StepTimes times{measured_rates(*trace), {measured_compute_seconds(*trace), {}, {}}};
  std::vector<double> stalls;
  for (size_t t = 0; t < trace->accesses.size(); ++t) {
    stalls.push_back(trace->accesses[t].seconds - times.shape.compute_seconds[t]);
  }
  return StepSoFar{running, std::move(times), std::move(stalls)};
}

void expect_step(OpenEngine& open, ExpectedStep expected) { open.expected = std::move(expected); }

void train(OpenEngine& open, const std::vector<ParamId>& params) {
  open.unfreezing.train(params);
  if (open.placing == StatesPlacing::kDone) open.placing = StatesPlacing::kOfUnfrozen;
}

}  // namespace patrickstar
