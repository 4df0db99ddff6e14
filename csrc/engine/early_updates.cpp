#include "engine/early_updates.h"

#include <utility>

#include "common/ablation.h"
#include "common/reserve.h"

namespace patrickstar {

EarlyUpdates::EarlyUpdates(Pager& pager, const Gradients& gradients, HostUpdates& host_updates,
                           Speculation& speculation, UpdateJobs& jobs, UpdateArrays& arrays, UpdateStates& states)
    : pager_(pager),
      memory_(pager.memory()),
      store_(pager.store()),
      gradients_(gradients),
      disk_(pager.disk()),
      host_updates_(host_updates),
      speculation_(speculation),
      jobs_(jobs),
      arrays_(arrays),
      states_(states) {}

void EarlyUpdates::start(ChunkId chunk, Passes passes) {
  const ArrayId grad = arrays_.grad_of(chunk);
  ArrayRecord& record = memory_.array(grad);
  if (!speculation_.is_active() || speculation_.has(chunk) || gradients_.source(chunk) != grad.kind) return;
  if (!record.on_host || !gradients_.has_any(chunk) || !arrays_.has_states(chunk, Tier::kHost)) return;
  const ScaleBounds& scales = speculation_.expected_scales();
  const ChunkSpec& spec = store_.chunk(chunk);
  if (spec.puts_values_in_place()) {
    if (put_values(chunk, speculation_.expected_groups(), scales)) ++memory_.counters().num_speculated_updates;
    return;
  }
  NewValues values = speculation_.try_allocate(new_bytes(store_.layout(), chunk), passes);
  if (!values.param || (!values.has_states() && is_left_out(Mechanism::kTwoPhaseUpdates))) return;
  values.is_scale_independent = scales.is_exact();
  UpdateTarget target{};
  target.grad = record.block.data;
  target.grad_dtype = spec.dtype;
  target.param = values.param.data;
  target.apart = values.has_states() ? &values : nullptr;
  HostUpdate update;
  update.turn = Turn::kOfNeed;
  update.pass = values.has_states() ? Pass::kWhole : values.is_scale_independent ? Pass::kParam : Pass::kBetween;
  update.after.push_back(record.host_ready);
  arrays_.await_states(chunk, update.after);
  update.restores = jobs_.restores(chunk, target);
  update.carries = jobs_.carries(chunk, values);
  jobs_.add(chunk, target, speculation_.expected_groups(), static_cast<float>(scales.least), update.jobs);
  for (optim::UpdateJob& job : update.jobs) job.most_grad_scale = static_cast<float>(scales.most);
  if (!values.is_scale_independent) speculation_.keep_scale_dependent(chunk, update.jobs);
  speculation_.start(chunk, std::move(update), std::move(values));
  ++memory_.counters().num_speculated_updates;
}

bool EarlyUpdates::put_values(ChunkId chunk, const std::vector<GroupOptions>& groups, const ScaleBounds& scales) {
  ArrayRecord& param = memory_.array(arrays_.param_of(chunk));
  const ArrayRecord& grad = memory_.array(arrays_.grad_of(chunk));
  // A later use in this step needs the old values.
  const bool is_dead = pager_.next_use({chunk, ArrayKind::kParam}) == NextUse::kNever;
  if (!speculation_.has_scale_dependent_memory() || !param.on_host || !is_dead) return false;
  HostUpdate update;
  update.turn = Turn::kOfNeed;
  update.pass = Pass::kPut;
  arrays_.bring_value_to_host(chunk, update.after);
  memory_.drop_device_buffer(arrays_.param_of(chunk));
  if (store_.chunk(chunk).is_sharded()) memory_.discard({chunk, ArrayKind::kParam});
  update.after.push_back(grad.host_ready);
  arrays_.await_states(chunk, update.after);
  UpdateTarget target{};
  target.grad = grad.block.data;
  target.grad_dtype = store_.chunk(chunk).dtype;
  target.param = param.block.data;
  jobs_.add(chunk, target, groups, static_cast<float>(scales.least), update.jobs);
  for (optim::UpdateJob& job : update.jobs) {
    job.least_grad_scale = static_cast<float>(scales.least);
    job.most_grad_scale = static_cast<float>(scales.most);
  }
  speculation_.begin_scale_dependent(chunk, update.jobs);
  NewValues values;
  values.is_scale_independent = scales.is_exact();
  values.place = &param;
  values.put = update.jobs;
  speculation_.start(chunk, std::move(update), std::move(values));
  param.host_ready = nullptr;
  param.host_buffer_busy_until = nullptr;
  param.on_host = false;
  ++num_put_;
  return true;
}

void EarlyUpdates::restore_values(ChunkId chunk) {
  if (num_put_ > 0 && store_.chunk(chunk).puts_values_in_place()) speculation_.cancel(chunk);
}

void EarlyUpdates::restore_values(const std::vector<ParamId>& params) {
  if (num_put_ == 0) return;
  for (ParamId param : params) restore_values(store_.layout().placement(param).chunk);
}

void EarlyUpdates::restore_values() {
  for (ChunkId chunk = 0; num_put_ > 0 && chunk < store_.num_chunks(); ++chunk) restore_values(chunk);
  num_put_ = 0;
}

bool EarlyUpdates::begin_step(const std::vector<GroupOptions>& groups, double grad_scale) {
  const TraceScope stall(memory_.tracer(), {Track::kStall, StallCause::kHostUpdate});
  const bool as_expected = speculation_.begin_step(groups, grad_scale);
  if (!as_expected) num_put_ = 0;
  return as_expected;
}

void EarlyUpdates::cancel_all() {
  const TraceScope stall(memory_.tracer(), {Track::kStall, StallCause::kHostUpdate});
  speculation_.cancel_all();
  num_put_ = 0;
}

Passes EarlyUpdates::take_over(ChunkId chunk, const std::vector<GroupOptions>& groups, float grad_scale) {
  const NewValues& values = speculation_.pending(chunk);
  if (values.are_in_place()) {
    take_over_in_place(chunk, groups, grad_scale);
    return Passes::kTwo;
  }
  arrays_.discard_values(chunk);
  if (values.has_states()) {
    take_over_states(chunk);
    return Passes::kOne;
  }
  take_over_params(chunk, groups, grad_scale);
  return Passes::kTwo;
}

void EarlyUpdates::take_over_states(ChunkId chunk) {
  NewValues values = speculation_.take(chunk);
  states_.move(chunk, UpdateState::kMade);
  auto block = values.states.begin();
  for (ArrayKind kind : store_.chunk(chunk).state_kinds()) {
    ArrayRecord& record = memory_.array({chunk, kind});
    speculation_.free_after(std::exchange(record.block, std::move(*block++)), values.done);
    record.host_ready = values.done;
  }
  speculation_.free_after(arrays_.take_gradient(chunk), values.done);
  take_over_param(chunk, std::move(values.param), values.done);
}

void EarlyUpdates::take_over_params(ChunkId chunk, const std::vector<GroupOptions>& groups, float grad_scale) {
  const NewValues& started = speculation_.pending(chunk);
  const ArrayRecord& grad = memory_.array(arrays_.grad_of(chunk));
  UpdateTarget target{};
  target.grad = grad.block.data;
  target.grad_dtype = store_.chunk(chunk).dtype;
  target.param = started.param.data;
  std::vector<optim::UpdateJob> jobs;
  jobs_.add(chunk, target, groups, grad_scale, jobs);
  StatesPass rest = make_pass({chunk}, jobs);
  Event done = started.done;
  if (!started.is_scale_independent) {
    HostUpdate dependent;
    dependent.chunk = chunk;
    dependent.pass = Pass::kScaleDependent;
    dependent.turn = Turn::kOfNeed;
    dependent.jobs = std::move(jobs);
    speculation_.keep_scale_dependent(chunk, dependent.jobs);
    dependent.after = {started.done};
    done = host_updates_.submit(std::move(dependent));
    ++memory_.counters().num_scale_independent_updates;
  }
  NewValues values = speculation_.take(chunk);
  states_.move(chunk, UpdateState::kStatesBehind);
  rest.update->after.push_back(grad.host_ready);
  rest.update->after.push_back(done);
  rest.gradients.push_back(arrays_.take_gradient(chunk));
  add(std::move(rest));
  take_over_param(chunk, std::move(values.param), done);
}

void EarlyUpdates::take_over_param(ChunkId chunk, HostBuffer block, const Event& done) {
  ArrayRecord& param = memory_.array(arrays_.param_of(chunk));
  param.block = std::move(block);
  param.host_ready = done;
  param.set_on_host();
  jobs_.count_step(chunk);
  arrays_.note_new_values(chunk);
}

// Enqueues the scale-dependent values, and phase two behind them.
void EarlyUpdates::take_over_in_place(ChunkId chunk, const std::vector<GroupOptions>& groups, float grad_scale) {
  const NewValues& started = speculation_.pending(chunk);
  ArrayRecord& param = memory_.array(arrays_.param_of(chunk));
  HostUpdate dependent;
  dependent.chunk = chunk;
  dependent.pass = Pass::kPutScaleDependent;
  dependent.turn = Turn::kOfNeed;
  dependent.after = {started.done};
  UpdateTarget target{};
  target.grad = memory_.array(arrays_.grad_of(chunk)).block.data;
  target.grad_dtype = store_.chunk(chunk).dtype;
  target.param = param.block.data;
  jobs_.add(chunk, target, groups, grad_scale, dependent.jobs);
  for (size_t i = 0; i < dependent.jobs.size(); ++i)
    dependent.jobs[i].least_grad_scale = started.put[i].least_grad_scale;
  speculation_.keep_scale_dependent(chunk, dependent.jobs);
  StatesPass rest = make_pass({chunk}, dependent.jobs);
  rest.update->pass = Pass::kPutStates;
  param.host_ready = host_updates_.submit(std::move(dependent));
  states_.move(chunk, UpdateState::kStatesBehind);
  param.set_on_host();
  rest.update->after.push_back(param.host_ready);
  memory_.array(arrays_.grad_of(chunk)).on_host = false;
  add(std::move(rest));
  if (!speculation_.take(chunk).is_scale_independent) ++memory_.counters().num_scale_independent_updates;
  jobs_.count_step(chunk);
  arrays_.note_new_values(chunk);
}

bool EarlyUpdates::start_after_all(ChunkId chunk, const std::vector<GroupOptions>& groups, float grad_scale) {
  if (!store_.chunk(chunk).puts_values_in_place() || disk_.is_resting_tier_of(chunk)) return false;
  if (!speculation_.allows_passes()) return false;
  if (gradients_.source(chunk) != arrays_.grad_of(chunk).kind || !arrays_.has_states(chunk, Tier::kHost)) return false;
  return put_values(chunk, groups, {grad_scale, grad_scale});
}

StatesPass EarlyUpdates::make_pass(const std::vector<ChunkId>& chunks, const std::vector<optim::UpdateJob>& jobs) {
  StatesPass pass;
  pass.chunks = chunks;
  pass.update = std::make_shared<HostUpdate>();
  pass.update->chunk = chunks.front();
  pass.update->pass = Pass::kStates;
  pass.update->jobs = jobs;
  pass.update->after.reserve(2);
  pass.gradients.reserve(chunks.size());
  reserve_one(states_passes_);
  return pass;
}

// The next backward reaches the last chunks first.
void EarlyUpdates::submit_states_passes() {
  for (; !states_passes_.empty(); states_passes_.pop_back()) {
    StatesPass& pass = states_passes_.back();
    if (pass.update->pass == Pass::kStates) {
      for (optim::UpdateJob& job : pass.update->jobs) job.range.param = nullptr;
    }
    const Event done = host_updates_.submit(pass.update);
    for (ChunkId chunk : pass.chunks) {
      states_.move(chunk, UpdateState::kMade);
      arrays_.set_states_ready(chunk, done);
      ArrayRecord& sum = memory_.array({chunk, ArrayKind::kGradSum});
      if (sum.block) sum.host_buffer_busy_until = done;
      if (arrays_.has_gradient_place(chunk)) arrays_.leave_gradient(chunk, done);
    }
    for (HostBuffer& block : pass.gradients) speculation_.free_after(std::move(block), done);
  }
}

void EarlyUpdates::end_step() {
  submit_states_passes();
  num_put_ = 0;
}

void EarlyUpdates::drop_states_passes() {
  for (const StatesPass& pass : states_passes_) {
    for (const Event& event : pass.update->after) memory_.backend().settle(event);
  }
  states_passes_.clear();
}

}  // namespace patrickstar
