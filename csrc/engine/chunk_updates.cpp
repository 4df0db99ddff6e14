#include "engine/chunk_updates.h"

#include <algorithm>
#include <utility>

#include "common/ablation.h"

namespace patrickstar {

ChunkUpdates::ChunkUpdates(const UpdateParts& parts)
    : pager_(parts.pager),
      memory_(parts.pager.memory()),
      store_(parts.pager.store()),
      gradients_(parts.gradients),
      matrices_(parts.matrices),
      disk_(parts.pager.disk()),
      host_updates_(parts.host_updates),
      disk_updates_(parts.disk_updates),
      speculation_(parts.speculation),
      arrays_(parts.arrays),
      jobs_(parts.jobs),
      early_(parts.early),
      states_(parts.states),
      round_trips_(parts.pager) {}

void ChunkUpdates::on_device(ChunkId chunk, const std::vector<GroupOptions>& groups, float grad_scale) {
  std::vector<ArrayId> used{{chunk, gradients_.source(chunk)}};
  for (ArrayKind kind : store_.chunk(chunk).state_kinds()) used.push_back({chunk, kind});
  if (!arrays_.derives_value(chunk)) used.push_back(arrays_.param_of(chunk));
  std::vector<ScopedHold> holds;
  for (ArrayId id : used) holds.emplace_back(memory_.array(id));
  for (ArrayKind kind : store_.chunk(chunk).state_kinds()) pager_.ensure_state({chunk, kind}, Tier::kDevice);
  for (ArrayId id : used) pager_.bring(id);
  const int64_t scratch_bytes = matrices_.scratch_bytes(chunk);
  DeviceBuffer scratch = scratch_bytes > 0 ? pager_.take_device_buffer(scratch_bytes, used.front()) : DeviceBuffer();
  memory_.await_device_buffer(Queue::kCompute, scratch);
  UpdateTarget target = open_target(chunk, /*on_device=*/true);
  target.scratch = scratch.data;
  std::vector<optim::UpdateJob> jobs;
  jobs_.add(chunk, target, groups, grad_scale, jobs);
  const std::vector<Restore> restores = jobs_.restores(chunk, target);
  {
    const TraceScope span(memory_.tracer(), update_label(Track::kDeviceAdam, chunk, jobs));
    states_.move(chunk, UpdateState::kBegun);
    for (const Restore& restore : restores) {
      memory_.device_compute().cast_from_float(restore.in, restore.out, restore.dtype, restore.numel);
    }
    memory_.device_compute().update(jobs);
    states_.move(chunk, UpdateState::kMade);
  }
  if (scratch) scratch.busy.computed = memory_.backend().record(Queue::kCompute);
  for (ArrayKind kind : store_.chunk(chunk).state_kinds()) memory_.array({chunk, kind}).set_on_device();
  holds.clear();
  close_target(chunk, target);
}

// A parameter without a gradient gets its value from the master, which a round trip does not do.
bool ChunkUpdates::can_round_trip(ChunkId chunk) const {
  if (disk_.is_resting_tier_of(chunk)) return false;
  const ArrayId grad = arrays_.grad_of(chunk);
  if (gradients_.source(chunk) != grad.kind || !arrays_.has_states(chunk, Tier::kHost)) return false;
  const std::vector<ParamId>& params = store_.chunk(chunk).params;
  const auto has_gradient = [this](ParamId param) { return gradients_.has(param); };
  return !arrays_.derives_value(chunk) || std::all_of(params.begin(), params.end(), has_gradient);
}

void ChunkUpdates::by_round_trip(ChunkId chunk, const std::vector<GroupOptions>& groups, float grad_scale) {
  const ChunkSpec& spec = store_.chunk(chunk);
  const ArrayId param_id = arrays_.param_of(chunk);
  ArrayRecord& grad = memory_.array(arrays_.grad_of(chunk));
  ArrayRecord& param = memory_.array(param_id);
  const ScopedHold hold(grad);
  RoundTrip round_trip;
  round_trip.chunk = chunk;
  round_trip.grad = grad.device_buffer.data;
  const bool is_computed = !spec.is_sharded();  // a reduce-scatter made the gradient of a sharded chunk
  round_trip.grad_ready = is_computed ? memory_.backend().record(Queue::kCompute) : grad.device_ready;
  for (ArrayKind kind : spec.state_kinds()) {
    const ArrayRecord& state = memory_.array({chunk, kind});
    round_trip.after.push_back(state.host_ready);
    round_trip.after.push_back(state.host_buffer_busy_until);
  }
  const bool derives = arrays_.derives_value(chunk);
  if (!derives) {
    arrays_.bring_value_to_host(chunk, round_trip.after);
    if (param.on_device) {
      round_trip.value = param.device_buffer.data;
      round_trip.value_ready = param.device_ready;
    }
  } else {
    memory_.discard(param_id);
    pager_.ensure_host_buffer(param_id);
  }
  if (param_id.kind != ArrayKind::kParam) memory_.discard({chunk, ArrayKind::kParam});
  round_trip.param = param.block.data;
  UpdateTarget target{};
  target.grad = round_trip.grad;
  target.grad_dtype = spec.dtype;
  target.param = round_trip.param;
  jobs_.add(chunk, target, groups, grad_scale, round_trip.jobs);
  states_.move(chunk, UpdateState::kBegun);
  const RoundTripEvents events = round_trips_.update(round_trip);
  states_.move(chunk, UpdateState::kMade);
  for (ArrayKind kind : spec.state_kinds()) {
    ArrayRecord& state = memory_.array({chunk, kind});
    state.host_ready = events.down;
    state.host_buffer_busy_until = nullptr;
  }
  param.host_ready = events.down;
  param.host_buffer_busy_until = nullptr;
  if (round_trip.value != nullptr) param.device_buffer.busy.copied = events.used;
  grad.device_buffer.busy.copied = events.used;
  jobs_.count_step(chunk);
  memory_.discard(arrays_.grad_of(chunk));
  if (!derives) memory_.drop_device_buffer(param_id);
  param.set_on_host();
  arrays_.note_new_values(chunk);
}

std::optional<std::vector<HostBuffer>> ChunkUpdates::new_params(const std::vector<ChunkId>& chunks) {
  if (!speculation_.allows_passes() || disk_.is_resting_tier_of(chunks.front())) return std::nullopt;
  if (is_left_out(Mechanism::kTwoPhaseUpdates)) return std::nullopt;
  const bool any_in_place = std::any_of(chunks.begin(), chunks.end(),
                                        [this](ChunkId chunk) { return store_.chunk(chunk).puts_values_in_place(); });
  if (any_in_place) return std::nullopt;
  std::vector<HostBuffer> blocks(chunks.size());
  for (size_t i = 0; i < chunks.size(); ++i) {
    if (gradients_.source(chunks[i]) != arrays_.grad_of(chunks[i]).kind) continue;
    blocks[i] = speculation_.try_allocate_param(store_.num_bytes(arrays_.param_of(chunks[i])));
    if (!blocks[i]) return std::nullopt;
  }
  return blocks;
}

Passes ChunkUpdates::on_host(const std::vector<ChunkId>& chunks, Passes passes, const std::vector<GroupOptions>& groups,
                             float grad_scale) {
  Prepared prepared = prepare_on_host(chunks, passes, groups, grad_scale);
  const bool on_disk = disk_.is_resting_tier_of(chunks.front());
  const Event done = (on_disk ? disk_updates_ : host_updates_).submit(std::move(prepared.update));
  for (size_t i = 0; i < chunks.size(); ++i) {
    const ChunkId chunk = chunks[i];
    const UpdateTarget& target = prepared.targets[i];
    states_.move(chunk, prepared.params ? UpdateState::kStatesBehind : UpdateState::kMade);
    close_target(chunk, target);
    note_on_host(prepared, chunk, target, done);
    if (target.place != ParamPlace::kNew) continue;
    memory_.array(arrays_.param_of(chunk)).block = std::move((*prepared.params)[i]);
    prepared.rest.gradients.push_back(arrays_.take_gradient(chunk));
  }
  if (on_disk) disk_.store_updated(chunks.front());
  if (!prepared.params) return Passes::kOne;
  prepared.rest.update->after.push_back(done);
  early_.add(std::move(prepared.rest));
  return Passes::kTwo;
}

ChunkUpdates::Prepared ChunkUpdates::prepare_on_host(const std::vector<ChunkId>& chunks, Passes passes,
                                                     const std::vector<GroupOptions>& groups, float grad_scale) {
  Prepared prepared;
  HostUpdate& update = prepared.update;
  if (passes == Passes::kTwo) prepared.params = new_params(chunks);
  update.chunk = chunks.front();
  // Updates with states on the disk pass through sets of memory in turn.
  update.turn = disk_.is_resting_tier_of(chunks.front()) ? Turn::kInOrder : Turn::kOfNeed;
  for (size_t i = 0; i < chunks.size(); ++i) {
    const ChunkId chunk = chunks[i];
    const ArrayId grad{chunk, gradients_.source(chunk)};
    pager_.send_to_host(grad);
    bring_states_to_host(chunk, update);
    update.after.push_back(memory_.array(grad).host_ready);
    if (!arrays_.derives_value(chunk)) arrays_.bring_value_to_host(chunk, update.after);
    UpdateTarget target = open_target(chunk, /*on_device=*/false);
    target.scratch = matrices_.host_scratch(disk_.is_resting_tier_of(chunk) ? Tier::kDisk : Tier::kHost);
    if (prepared.params && (*prepared.params)[i]) {
      target.param = (*prepared.params)[i].data;
      target.place = ParamPlace::kNew;
    }
    for (const Restore& restore : jobs_.restores(chunk, target)) update.restores.push_back(restore);
    jobs_.add(chunk, target, groups, grad_scale, update.jobs);
    prepared.targets.push_back(target);
  }
  if (prepared.params) {
    update.pass = Pass::kParam;
    prepared.rest = early_.make_pass(chunks, update.jobs);
  }
  return prepared;
}

void ChunkUpdates::note_on_host(const Prepared& prepared, ChunkId chunk, const UpdateTarget& target,
                                const Event& done) {
  memory_.array(arrays_.param_of(chunk)).host_ready = done;
  if (prepared.params) return;  // phase two updates the states
  for (ArrayKind kind : store_.chunk(chunk).state_kinds()) {
    memory_.array({chunk, kind}).host_ready = done;
    memory_.array({chunk, kind}).set_on_host();
  }
  if (gradients_.source(chunk) == ArrayKind::kGradSum) {
    memory_.array({chunk, ArrayKind::kGradSum}).host_buffer_busy_until = done;
  } else if (target.place == ParamPlace::kOwn) {
    arrays_.leave_gradient(chunk, done);
  }
}

void ChunkUpdates::bring_states_to_host(ChunkId chunk, HostUpdate& update) {
  const bool on_disk = disk_.is_resting_tier_of(chunk);
  if (on_disk) disk_.fetch(chunk);
  for (ArrayKind kind : store_.chunk(chunk).state_kinds()) {
    const ArrayId id{chunk, kind};
    pager_.ensure_state(id, Tier::kHost);
    if (!on_disk) {
      pager_.bring_to_host(id);
      continue;
    }
    const ArrayRecord& record = memory_.array(id);
    update.after.push_back(record.host_buffer_busy_until);
    if (record.host_ready != nullptr) update.states.push_back(record.host_ready);
  }
}

UpdateTarget ChunkUpdates::open_target(ChunkId chunk, bool on_device) {
  const ArrayId grad{chunk, gradients_.source(chunk)};
  const ArrayId param = arrays_.param_of(chunk);
  const ArrayRecord& record = memory_.array(grad);
  const bool is_own = grad.kind == arrays_.grad_of(chunk).kind;
  UpdateTarget target{};
  target.on_device = on_device;
  target.place = is_own && arrays_.derives_value(chunk) ? ParamPlace::kGradient : ParamPlace::kOwn;
  target.grad_dtype = is_own ? store_.chunk(chunk).dtype : DType::kFloat32;
  target.grad = on_device ? record.device_buffer.data : record.block.data;
  if (param.kind != ArrayKind::kParam) memory_.discard({chunk, ArrayKind::kParam});
  if (target.place == ParamPlace::kGradient) {
    memory_.discard(param);
    target.param = const_cast<void*>(target.grad);
  } else {
    target.param = own_place(param, on_device);
  }
  return target;
}

// If the value does not exist, it is derived from the master until the update writes the new one.
void* ChunkUpdates::own_place(ArrayId param, bool on_device) {
  ArrayRecord& record = memory_.array(param);
  const bool derives = arrays_.derives_value(param.chunk);
  if (on_device && (!derives || record.on_device)) return pager_.open_for_write(param);
  if (on_device) {
    memory_.drop_host_buffer(param);
    pager_.ensure_device_buffer(param);
    memory_.await_device_buffer(Queue::kCompute, record.device_buffer);
    return record.device_buffer.data;
  }
  memory_.drop_device_buffer(param);
  pager_.ensure_host_buffer(param);
  if (derives) memory_.await_on_host(param);  // otherwise the update waits
  return record.block.data;
}

void ChunkUpdates::close_target(ChunkId chunk, const UpdateTarget& target) {
  jobs_.count_step(chunk);
  const ArrayId param_id = arrays_.param_of(chunk);
  ArrayRecord& param = memory_.array(param_id);
  ArrayRecord& grad = memory_.array(arrays_.grad_of(chunk));
  const bool in_gradient = target.place == ParamPlace::kGradient;
  if (in_gradient && target.on_device) {
    param.device_buffer = std::exchange(grad.device_buffer, {});
    param.device_ready = std::exchange(grad.device_ready, nullptr);
    grad.on_device = false;
  } else if (in_gradient) {
    param.block = std::exchange(grad.block, {});
    grad.host_ready = nullptr;
    grad.on_host = false;
  }
  if (target.on_device && store_.chunk(chunk).is_sharded() && arrays_.derives_value(chunk)) {
    memory_.discard(param_id);  // all-gathers make it from the master
  } else if (target.on_device) {
    memory_.present(Queue::kCompute, chunk);
    param.set_on_device();
    if (param_id.kind == ArrayKind::kParam) memory_.attach(chunk);
    if (target.place == ParamPlace::kOwn) memory_.discard(arrays_.grad_of(chunk));
  } else {
    param.set_on_host();
  }
  arrays_.note_new_values(chunk);
}

}  // namespace patrickstar
