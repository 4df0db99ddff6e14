#include "engine/runtime.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "common/check.h"

namespace patrickstar {

namespace {

void forget_running_step(OpenEngine& open) {
  open.pager.replay().end_step();
  open.recorder.abandon_step();
  open.memory.tracer().abandon();
}

LimitPolicy policy_between_calls(const OpenEngine& open) {
  return open.warmed_up ? LimitPolicy::kEnforce : LimitPolicy::kMeasure;
}

// An exception left a forward or a backward.
void abandon_call(OpenEngine& open) {
  open.pager.set_running(false);
  open.tracker.abandon_all();
  open.tracker.set_tracking(Tracking::kUntracked);
  open.flow.forget_complete();
  open.backend().set_limit_policy(policy_between_calls(open));
  forget_running_step(open);
}

// Nothing is trained: no step of an optimizer ends one of its own.
bool is_frozen(const Layout& layout) {
  const auto& chunks = layout.chunks();
  return std::none_of(chunks.begin(), chunks.end(), [](const ChunkSpec& chunk) { return chunk.trainable; });
}

// The timeline, with its tides where `tides` are lower.
Timeline with_tides(Timeline timeline, const std::vector<int64_t>& tides) {
  for (size_t t = 0; t < tides.size(); ++t) {
    int64_t& peak = timeline.moments[t].tide_peak_bytes;
    peak = std::max(peak, tides[t]);
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

// [Note: the least limit] An error that names the memory to raise the budget to must name enough. So on the simulated
// device what exceeds the limit passes (LimitPolicy::kMeasure) wherever the call cannot be made again with an emptier
// device, and is refused here, when the whole is known; before anything is updated, and on all ranks.
void check_least_limit(OpenEngine& open, const char* what) {
  if (!open.backend().may_exceed_limit()) return;
  int64_t least = open.backend().least_limit_bytes();
  if (open.layout().is_sharded()) least = open.collectives->max_over_ranks(least);
  const int64_t limit = open.options.device.device_limit_bytes;
  if (least <= limit) return;
  if (open.layout().is_sharded())
    least += largest_whole_chunk_bytes(open.layout());  // gathered ahead, as a plan may say
  if (least >= open.options.ample_limit_bytes) least += open.options.ample_extra_bytes;
  open.backend().reset_least_limit();
  PS_CHECK(false, MemoryBudgetError, "device_memory is ", limit, " bytes, but ", what, " needs ", least,
           " bytes at its peak even with every idle chunk evicted; raise device_memory to at least ", least,
           " bytes, or lower the batch size or default_chunk_size",
           open.updates.num_committed() > 0 ? "" : ". Nothing was updated");
}

void fill_margin(OpenEngine& open, const Timeline& step) {
  if (open.updates.num_committed() > 0) return;  // updates are under way; states stay on the host
  open.updates.cancel_all();
  open.residency.fill_margin(step);
  open.updates.forget_choice();
}

// A step's tide is known. States of before the first step, of a checkpoint or of other ranks, are read by updates that
// began in its backward, which are of no use where the states move.
void place_states(OpenEngine& open, const Timeline& step) {
  if (std::exchange(open.has_new_states, false)) return fill_margin(open, step);
  open.updates.cancel_all();
  open.residency.place_in_margin(step);
}

void leave_to_gradients(OpenEngine& open) {
  open.updates.leave_to_gradients(open.residency.leaving_gradient_bytes(open.recorder.last()));
}

void choose_speculation(OpenEngine& open) {
  if (open.updates.must_choose_speculation()) leave_to_gradients(open);
  open.updates.choose_speculation();
}

// Gradients are over, and values are live again.
void end_gradients(OpenEngine& open) {
  open.flow.clear();
  for (ParamId param = 0; param < open.layout().num_params(); ++param) {
    const bool exists = open.memory.store().array({open.layout().placement(param).chunk, ArrayKind::kParam}).exists();
    if (open.memory.store().param_state(param) != State::kFree || exists)
      open.memory.store().move_param(param, exists ? State::kHold : State::kFree);
  }
}

void finish_step(OpenEngine& open, StepOutcome outcome) {
  end_gradients(open);
  // Of several ranks one that used no chunk takes part in what all of them decide.
  const bool any_moment = open.recorder.position() >= 0;
  if (!any_moment && !open.layout().is_sharded()) return open.memory.tracer().abandon();
  const bool first = !open.warmed_up;
  Timeline previous = open.recorder.last();
  const PlanReplay::Course course = open.pager.replay().course();
  const bool is_exact = any_moment && (!open.pager.replays() || course == PlanReplay::Course::kExact);
  std::vector<int64_t> planned_tides = open.pager.replay().tides();
  std::vector<int64_t>* const followed = open.pager.replays() ? &planned_tides : nullptr;
  open.pager.replay().end_step();
  // The optimizer's own moment is not counted: no activations live then, and on CUDA the slots that it makes for
  // optimizer states would be taken for tide.
  open.recorder.finish_step();
  if (first) {
    open.warmed_up = true;
    open.backend().set_limit_policy(LimitPolicy::kEnforce);
    open.updates.forget_choice();  // of what was unfrozen before
    choose_speculation(open);
  }
  Timeline last = open.recorder.last();
  const PlanVote mine = open.planner.vote(previous, is_exact ? StepWay::kAsRecorded : StepWay::kAsBefore);
  const StepAgreement agreement = open.collectives->agree_on(last, followed, packed(mine));
  std::vector<PlanVote> votes;
  for (const std::string& note : agreement.notes) {
    votes.push_back(unpacked_vote(note, static_cast<size_t>(open.layout().num_chunks())));
  }
  const PlanVote all = agreed(votes);
  if (agreement.ways == StepAgreement::Ways::kAsPlanned) last = with_tides(previous, planned_tides);
  open.recorder.set_last(std::move(last));
  is_exact ? open.memory.tracer().end_step(open.recorder.last(), outcome) : open.memory.tracer().abandon();
  open.residency.set_ranks_fragments(all.fragment_bytes);
  open.residency.limit_payloads(open.recorder.last());
  if (!open.turns.may_plan_after(agreement.ways)) return open.planner.forget_plan();  // all ranks found so
  const bool holds = open.planner.end_step(previous, all);
  if (!holds) leave_to_gradients(open);  // the tide may have risen
  if (holds && open.residency.leave_to_device(open.pager.plan())) open.updates.forget_choice();
}

}  // namespace

Runtime::Runtime(Layout layout, std::vector<std::string> param_names,
                 const std::vector<std::vector<ParamId>>& module_params, const EngineOptions& options,
                 std::shared_ptr<Collectives> collectives, std::shared_ptr<KeptRegions> kept) {
  const std::shared_ptr<SharedDevice> device = SharedDevice::open(options.device);
  lock_ = device->lock();
  const std::lock_guard<SharedDevice::Lock> lock(*lock_);
  open_ = std::make_unique<OpenEngine>(device, std::move(layout), std::move(param_names), module_params, options,
                                       std::move(collectives), std::move(kept));
}

Runtime::~Runtime() {
  if (!made_in_.is_here()) {
    open_.release();  // its threads are the other process's
    return;
  }
  if (open_ == nullptr) return;
  open_->collectives->abort();
  try {
    close();
  } catch (const std::exception&) {  // it is freed all the same
  }
}

void Runtime::check_process() const {
  PS_CHECK(
      made_in_.is_here(), StateError,
      "this process is a fork of the one that made this engine (a DataLoader worker, a subprocess?), and has none of "
      "its threads; use the engine in the process that made it, and hand tensors to forks");
}

Runtime::Entry::Entry(Runtime& runtime) : lock_((runtime.check_process(), *runtime.lock_)), open_(runtime.open_.get()) {
  PS_CHECK(open_ != nullptr, StateError,
           "this engine is closed, but something of it is still used (the backward of an old loss?); "
           "build a new engine to train on");
}

Runtime::Entry Runtime::compute() {
  Entry open(*this);
  open->backend().follow_compute();
  return open;
}

void Runtime::close() {
  check_process();
  std::shared_ptr<SharedDevice> device;  // which ends, if no other engine has it, when the lock is free again
  const std::lock_guard<SharedDevice::Lock> lock(*lock_);
  const std::unique_ptr<OpenEngine> open = std::move(open_);
  if (open == nullptr) return;
  device = open->device;
  open->shut_down();
}

std::shared_ptr<KeptRegions> Runtime::keep_memory() {
  const Entry open(*this);
  auto kept = std::make_shared<KeptRegions>();
  open->memory.arena().keep_regions(kept);
  return kept;
}

bool Runtime::closed() {
  check_process();
  const std::lock_guard<SharedDevice::Lock> lock(*lock_);
  return open_ == nullptr;
}

void Runtime::bind_storage(ChunkId chunk, c10::StorageImpl* storage) {
  const Entry open(*this);
  const ArrayId id{chunk, ArrayKind::kParam};
  open->memory.store().storage(chunk) =
      ParamStorage(storage, open->memory.store().num_bytes(id),
                   open->memory.store().describe(id) +
                       ": its memory is not on the device now. PatrickStar brings parameters in when a module or a "
                       "torch function uses them; code that reads a tensor's memory in another way must run inside the "
                       "module that owns it.");
}

void Runtime::seal_storage(ChunkId chunk) {
  const Entry open(*this);
  open->memory.store().storage(chunk).detach();
}

void Runtime::write_values(ParamId param, ArrayKind kind, ParamValues values) {
  const Entry open = compute();
  const ChunkId chunk = open->layout().placement(param).chunk;
  open->tracker.release_transient();
  open->updates.cancel(chunk);
  open->values.write(param, kind, values, open->memory.store().home(chunk));
}

void Runtime::read_values(ParamId param, ArrayKind kind, float* values) {
  const Entry open = compute();
  open->updates.restore_values({param});
  open->values.read(param, kind, values);
}

void Runtime::read_own_values(ParamId param, ArrayKind kind, float* values) {
  const Entry open = compute();
  open->updates.restore_values({param});
  open->values.read_own(param, kind, values);
}

void Runtime::read_ranges(const std::vector<ValueRange>& ranges, const std::vector<RangeFile>& files) {
  const Entry open = compute();
  open->updates.restore_values();
  open->ranges.read(ranges, files);
}

void Runtime::write_ranges(const std::vector<ValueRange>& ranges, const std::vector<RangeFile>& files) {
  const Entry open = compute();
  open->tracker.release_transient();
  for (ChunkId chunk = 0; chunk < open->layout().num_chunks(); ++chunk) open->updates.cancel(chunk);
  open->ranges.write(ranges, files);
}

std::vector<int64_t> Runtime::stored_bytes(ParamId param) {
  const Entry open(*this);
  return open->ranges.stored_bytes(param);
}

bool Runtime::is_stored_on_device(ParamId param) {
  const Entry open(*this);
  return open->ranges.is_stored_on_device(param);
}

std::vector<const void*> Runtime::stored_on_device(ParamId param) {
  const Entry open = compute();
  return open->ranges.stored_on_device(param);
}

void Runtime::write_stored(ParamId param, const std::vector<StoredRange>& ranges) {
  const Entry open = compute();
  open->tracker.release_transient();
  open->updates.cancel(open->layout().placement(param).chunk);
  open->ranges.write_stored(param, ranges);
}

void Runtime::drop_derivable() {
  const Entry open = compute();
  open->tracker.release_transient();
  open->pager.drop_derivable();
}

void Runtime::return_cached() {
  const Entry open = compute();
  open->memory.slots().trim(INT64_MAX);
  open->backend().reclaim();
}

void Runtime::copy_on_device(void* to, const void* from, int64_t num_bytes) {
  const Entry open = compute();
  open->backend().copy(Queue::kCompute, to, from, num_bytes);
}

void Runtime::leave_stored(ChunkId chunk) {
  const Entry open = compute();
  open->tracker.abandon_all();
  open->updates.forget_committed();
  open->updates.cancel(chunk);
  for (int kind = 0; kind < kNumArrayKinds; ++kind) open->memory.discard({chunk, static_cast<ArrayKind>(kind)});
  open->memory.slots().trim(INT64_MAX);
}

ValueRanges::SetAside Runtime::set_aside(const std::vector<ValueRange>& ranges) {
  const Entry open = compute();
  open->tracker.abandon_all();
  open->updates.forget_committed();
  open->updates.cancel_all();
  auto free = std::make_shared<KeptRegions>();
  open->memory.arena().keep_regions(free);
  open->speculation.release_memory();
  return open->ranges.set_aside(ranges, std::move(free));
}

void Runtime::read_gradient(ParamId param, float* values) {
  const Entry open = compute();
  open->updates.check_nothing_committed("a gradient was to be read");
  open->values.read_gradient(param, open->gradients.source(open->layout().placement(param).chunk), values);
}

void Runtime::write_gradient(ParamId param, ParamValues values) {
  const Entry open = compute();
  const ChunkId chunk = open->layout().placement(param).chunk;
  open->updates.check_nothing_committed("a gradient was to be written");
  open->flow.note_rewritten(chunk);
  open->values.write_gradient(param, open->gradients.source(chunk), values);
}

void Runtime::adopt_timeline(Timeline timeline, std::optional<StepTimes> times) {
  const Entry open = compute();
  PS_CHECK(!open->warmed_up && open->recorder.position() < 0, StateError,
           "a plan is adopted before the first step only");
  open->recorder.set_last(std::move(timeline));
  open->residency.place_in_margin(open->recorder.last());
  open->residency.limit_payloads(open->recorder.last());
  open->planner.adopt(std::move(times));
}

void Runtime::make_states(const std::vector<ChunkId>& chunks) {
  const Entry open = compute();
  open->tracker.release_transient();
  open->unfreezing.make_states(chunks);
}

void Runtime::discard_states(const std::vector<ChunkId>& chunks) {
  const Entry open = compute();
  open->unfreezing.discard_states(chunks);
}

void Runtime::train(const std::vector<ParamId>& params) {
  const Entry open = compute();
  open->tracker.release_transient();
  open->unfreezing.train(params);
  open->has_new_states = open->warmed_up;
}

void Runtime::release_chunk(ChunkId chunk) {
  const Entry open(*this);
  open->tracker.abandon_all();
  open->updates.forget_committed();
  open->updates.cancel(chunk);
  open->disk.forget(chunk);
  for (int kind = 0; kind < kNumArrayKinds; ++kind) open->memory.discard({chunk, static_cast<ArrayKind>(kind)});
  open->memory.slots().trim(INT64_MAX);
  open->memory.arena().trim();
}

void Runtime::begin_forward(Tracking tracking, Attempt attempt) {
  const Entry open = compute();
  open->updates.restore_values();
  open->disk.check();
  if (tracking == Tracking::kTraining && is_frozen(open->layout())) forget_running_step(*open);
  if (open->recorder.position() < 0) open->backend().reset_least_limit();
  open->pager.set_running(true);
  open->tracker.release_transient();
  open->tracker.set_tracking(tracking);
  open->tracker.set_phase(Phase::kForward);
  const bool first = attempt == Attempt::kFirst || attempt == Attempt::kOnly;
  const bool begins_step = open->recorder.position() < 0 && !open->pager.replays();
  if (tracking == Tracking::kTraining && begins_step && first) {
    open->device->take_tide_peak(open->pager);
    open->pager.restart_replay();
    open->memory.arena().release_reused();
    open->memory.arena().prepare_ahead();  // momentum and variance, beside the first step
    open->planner.begin_step();
    open->memory.tracer().begin_step();
  }
  if (!first) open->device->take_tide_peak(open->pager);
  if (tracking == Tracking::kTraining) {
    open->recorder.begin_forward();
    open->turns.begin_forward(attempt == Attempt::kOnly ? CallSharing::kShared : CallSharing::kOwn);
  }
  // With a plan of several ranks, chunks can make room by the host: what is missing is measured.
  const bool has_plan = open->pager.replay().course() != PlanReplay::Course::kNone;
  const bool last = attempt == Attempt::kLast || attempt == Attempt::kOnly || (open->layout().is_sharded() && has_plan);
  open->backend().set_limit_policy(last ? LimitPolicy::kMeasure : policy_between_calls(*open));
}

void Runtime::end_forward() {
  const Entry open = compute();
  const bool training = open->tracker.tracking() == Tracking::kTraining;
  open->tracker.release_all();
  if (training) {
    if (!open->turns.finish_forward()) open->memory.tracer().abandon();
    open->recorder.end_phase();
  } else if (open->layout().is_sharded()) {
    open->turns.finish_phase();
  }
  open->pager.set_running(false);
  open->tracker.set_tracking(Tracking::kUntracked);
  open->backend().set_limit_policy(training ? LimitPolicy::kMeasure : policy_between_calls(*open));
  if (!training) check_least_limit(*open, "this forward pass");
}

Tick Runtime::open_scope(const std::vector<ParamId>& params, HoldUntil until) {
  const Entry open = compute();
  open->updates.check_not_committed(params);
  open->updates.restore_values(params);
  return open->tracker.open_scope(params, until);
}

void Runtime::close_scope() {
  const Entry open = compute();
  open->tracker.close_scope();
}

Tick Runtime::tick() {
  const Entry open(*this);
  return open->tracker.tick();
}

Tick Runtime::touch(const std::vector<ParamId>& params) {
  const Entry open = compute();
  open->updates.check_not_committed(params);
  open->updates.restore_values(params);
  return open->tracker.touch(params);
}

void Runtime::begin_backward(const std::vector<GroupOptions>& expected_groups, double expected_grad_scale) {
  const Entry open = compute();
  open->updates.check_nothing_committed("a second backward");
  open->updates.restore_values();
  open->updates.expect(expected_groups, expected_grad_scale);
  if (!open->flow.pending()) {
    choose_speculation(*open);
    open->disk.expect_updates();
  }
  open->tracker.release_transient();
  open->pager.set_running(true);
  open->tracker.set_tracking(Tracking::kTraining);
  open->tracker.set_phase(Phase::kBackward);
  open->backend().set_limit_policy(LimitPolicy::kMeasure);
  try {
    open->turns.begin_backward();
    open->flow.begin_backward();
  } catch (...) {
    abandon_call(*open);
    throw;
  }
}

void Runtime::enter_backward(Tick begin, Tick end, const std::vector<ParamId>& params) {
  const Entry open = compute();
  open->updates.check_not_committed(params);
  open->updates.restore_values(params);
  open->tracker.enter_backward(begin, end, params);
}

void Runtime::fold_gradient(ParamId param, const void* data) {
  const Entry open = compute();
  open->flow.fold(param, data);
}

void Runtime::end_backward() {
  const Entry open = compute();
  open->tracker.release_all();
  open->flow.complete_backward();
  open->turns.finish_backward();
  open->recorder.end_phase();
  open->updates.fetch_gradients();
  open->pager.set_running(false);
  open->tracker.set_tracking(Tracking::kUntracked);
  open->backend().set_limit_policy(policy_between_calls(*open));
  check_least_limit(*open, "this step");
}

bool Runtime::keep_joint_backward() {
  const Entry open = compute();
  if (open->flow.keep_backward()) return true;
  if (is_frozen(open->layout())) {
    open->recorder.note_tide(open->pager.tide_of_running_moment());
    finish_step(*open, StepOutcome::kSkipped);
  }
  return false;
}

void Runtime::meet_ranks() {
  const Entry open = compute();
  const bool is_planned = open->pager.replays() && open->tracker.tracking() == Tracking::kTraining;
  if (open->layout().is_sharded() && !is_planned) open->turns.finish_phase();
}

int64_t Runtime::tide_bytes() { return Entry(*this)->backend().tide_bytes(); }

int64_t Runtime::host_room_of_activations() { return Entry(*this)->stash.host_room_bytes(); }

int64_t Runtime::take_live_tide_peak() { return Entry(*this)->backend().take_live_tide_peak(); }

void Runtime::keep_absent_activations(int64_t most_bytes) {
  const Entry open(*this);
  open->recorder.note_tide(open->pager.tide_of_running_moment());
  open->recorder.count_absent(most_bytes);
}

Stash::Ticket Runtime::stash_activation(const void* data, int64_t num_bytes) {
  return compute()->stash.put(data, num_bytes);
}

bool Runtime::is_stashed(Stash::Ticket ticket) { return Entry(*this)->stash.is_over(ticket); }

void Runtime::finish_stashing(Stash::Ticket ticket) { Entry(*this)->stash.finish(ticket); }

void Runtime::fetch_activation(Stash::Ticket ticket, void* to) { compute()->stash.fetch(ticket, to); }

void Runtime::await_activation(Stash::Ticket ticket) { compute()->stash.await(ticket); }

void Runtime::drop_activation(Stash::Ticket ticket) {
  if (!made_in_.is_here()) return;
  const std::lock_guard<SharedDevice::Lock> lock(*lock_);
  if (open_) open_->stash.drop(ticket);
}

void Runtime::undo_forward() {
  const Entry open = compute();
  open->tracker.release_all();
  open->backend().reclaim();
  if (open->tracker.tracking() == Tracking::kTraining) {
    open->turns.undo_forward();
    open->recorder.undo_forward();
    open->memory.tracer().abandon();
  }
  open->tracker.set_tracking(Tracking::kUntracked);
}

void Runtime::vacate_device(Vacate what) {
  const Entry open = compute();
  open->updates.release_device_memory();
  open->pager.vacate(what);
}

void Runtime::set_visits(const std::vector<bool>& chunks, int64_t piece_numel) {
  const Entry open(*this);
  PS_CHECK(chunks.empty() || static_cast<int>(chunks.size()) == open->layout().num_chunks(), ArgumentError,
           chunks.size(), " chunks visit the device or do not, of ", open->layout().num_chunks(), "; give all or none");
  open->updates.visit({chunks.begin(), chunks.end()}, piece_numel);
}

void Runtime::abort_forward() {
  const Entry open(*this);
  abandon_call(*open);
}

int Runtime::abort_backward() {
  const Entry open(*this);
  abandon_call(*open);
  const int num_committed = open->updates.num_committed() + (open->updates.is_torn() ? 1 : 0);
  open->updates.forget_committed();
  open->updates.cancel_all();
  open->flow.abort_backward();
  open->disk.expect_nothing();
  return num_committed;
}

double Runtime::prepare_step(std::vector<ParamId> left_out) {
  const Entry open = compute();
  std::sort(left_out.begin(), left_out.end());
  open->memory.tracer().begin_optimizer();
  open->tracker.release_all();
  const double sum = open->flow.sum_of_squares(left_out);
  open->recorder.note_tide(open->pager.tide_of_running_moment());
  const bool is_time_to_return = open->residency.is_time_to_return();
  if (open->recorder.position() < 0 && !open->layout().is_sharded()) return sum;
  if (!open->warmed_up || open->has_new_states) {
    Timeline timeline = open->recorder.running();
    open->collectives->agree_on(timeline, nullptr);
    place_states(*open, timeline);
  } else if (open->residency.is_settling()) {
    Timeline timeline = open->recorder.running();
    open->collectives->agree_on(timeline, nullptr);
    if (open->residency.has_room_for_more(timeline)) fill_margin(*open, timeline);
  } else if (is_time_to_return) {
    fill_margin(*open, open->recorder.running());
  }
  return sum;
}

void Runtime::apply_step(const std::vector<GroupOptions>& groups, double grad_scale, double clip_ratio) {
  const Entry open = compute();
  if (open->step_stage == StepStage::kToCome) open->updates.check_step(groups, grad_scale);
  if (open->step_stage != StepStage::kEnding) {
    try {
      open->updates.apply(groups, grad_scale, clip_ratio);
    } catch (...) {
      const bool is_touched = open->updates.num_committed() > 0 || open->updates.is_torn();
      open->step_stage = is_touched ? StepStage::kUpdating : StepStage::kToCome;
      throw;
    }
    open->updates.forget_committed();
    ++open->memory.counters().num_steps;
    open->step_stage = StepStage::kEnding;
  }
  finish_step(*open, StepOutcome::kApplied);
  open->step_stage = StepStage::kToCome;
}

void Runtime::skip_step() {
  const Entry open = compute();
  if (open->step_stage == StepStage::kToCome) {
    open->updates.check_nothing_committed("a skipped step");
    open->updates.cancel_all();
    ++open->memory.counters().num_skipped_steps;
    open->step_stage = StepStage::kEnding;
  }
  finish_step(*open, StepOutcome::kSkipped);
  open->step_stage = StepStage::kToCome;
}

StepProgress Runtime::step_progress() {
  const Entry open(*this);
  if (open->updates.is_torn()) return StepProgress::kTorn;
  switch (open->step_stage) {
    case StepStage::kToCome:
      break;
    case StepStage::kUpdating:
      return StepProgress::kInPart;
    case StepStage::kEnding:
      return StepProgress::kEnding;
  }
  return StepProgress::kUntouched;
}

void Runtime::drop_step() {
  const Entry open = compute();
  open->step_stage = StepStage::kToCome;
  open->updates.drop_step();
  end_gradients(*open);
  open->disk.expect_nothing();
  forget_running_step(*open);
}

void Runtime::clear_gradients() {
  const Entry open(*this);
  if (!open->flow.pending()) return;
  open->updates.check_nothing_committed("gradients were to be forgotten");
  open->updates.cancel_all();
  open->flow.clear();
  open->disk.expect_nothing();
  forget_running_step(*open);
}

void Runtime::clear_gradient(ParamId param) {
  const Entry open(*this);
  open->flow.clear_param(param);
}

void Runtime::forget_plan() {
  const Entry open(*this);
  open->planner.forget_plan();
}

bool Runtime::has_gradient(ParamId param) {
  const Entry open(*this);
  return open->gradients.has(param);
}

bool Runtime::gradients_pending() {
  const Entry open(*this);
  return open->flow.pending();
}

void Runtime::set_group(ParamId param, int group) {
  const Entry open(*this);
  open->updates.set_group(param, group);
}

int64_t Runtime::step_count(ParamId param) {
  const Entry open(*this);
  return open->updates.step_count(param);
}

void Runtime::set_step_count(ParamId param, int64_t count) {
  const Entry open(*this);
  open->updates.set_step_count(param, count);
}

int Runtime::num_committed() {
  const Entry open(*this);
  return open->updates.num_committed();
}

void Runtime::start_trace(TraceReader reader) {
  const Entry open(*this);
  open->traces.ask(reader);
}

std::optional<StepTrace> Runtime::take_trace(TraceReader reader) {
  const Entry open(*this);
  return open->traces.take(reader);
}

RuntimeReport Runtime::report() { return report_of(*Entry(*this)); }

void Runtime::reset_report() {
  const Entry open(*this);
  open->memory.counters() = {};
  open->backend().reset_peak();
  open->memory.arena().reset_peak();
}

int64_t Runtime::num_pressure_evictions() {
  const Entry open(*this);
  return open->memory.counters().num_pressure_evictions;
}

Timeline Runtime::last_timeline() {
  const Entry open(*this);
  return open->recorder.last();
}

Plan Runtime::plan() {
  const Entry open(*this);
  return open->pager.plan();
}

PlanProblem Runtime::plan_problem() {
  const Entry open(*this);
  PlanProblem problem = open->planner.problem();
  problem.timeline = nullptr;
  return problem;
}

std::optional<StepTimes> Runtime::step_times() {
  const Entry open(*this);
  return open->planner.times();
}

std::optional<SimulatedStep> Runtime::predicted_step() {
  const Entry open(*this);
  return open->planner.predicted();
}

bool Runtime::replays() {
  const Entry open(*this);
  return open->pager.replays();
}

State Runtime::param_state(ParamId param) {
  const Entry open(*this);
  return open->memory.store().param_state(param);
}

State Runtime::chunk_state(ChunkId chunk) {
  const Entry open(*this);
  return open->memory.store().chunk_state(chunk);
}

Tier Runtime::home(ChunkId chunk) {
  const Entry open(*this);
  return open->memory.store().home(chunk);
}

std::shared_ptr<DiskFaults> Runtime::disk_faults() {
  const Entry open(*this);
  return open->disk.options().file.faults;
}

bool Runtime::is_on_device(ArrayId array) {
  const Entry open(*this);
  return open->memory.store().array(array).on_device;
}

}  // namespace patrickstar
