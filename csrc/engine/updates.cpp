#include "engine/updates.h"

#include <algorithm>
#include <utility>

#include "common/check.h"

namespace patrickstar {

namespace {

// Host chunks are updated in batches of at least this many elements, so that small chunks keep all threads busy.
constexpr int64_t kBatchNumel = int64_t{4} << 20;

}  // namespace

Updates::Updates(Pager& pager, const Gradients& gradients, HostUpdates& host_updates, HostUpdates& disk_updates,
                 Speculation& speculation)
    : pager_(pager),
      memory_(pager.memory()),
      store_(pager.store()),
      gradients_(gradients),
      disk_(pager.disk()),
      host_updates_(host_updates),
      disk_updates_(disk_updates),
      speculation_(speculation),
      visits_(pager),
      arrays_(pager, speculation),
      jobs_(store_, gradients),
      early_(pager, gradients, host_updates, speculation, jobs_, arrays_),
      committed_(static_cast<size_t>(store_.num_chunks()), 0) {}

void Updates::set_step_count(ParamId param, int64_t count) {
  cancel(store_.layout().placement(param).chunk);
  jobs_.set_step_count(param, count);
}

void Updates::expect(const std::vector<GroupOptions>& groups, double full_scale) {
  held_back_ = -1;
  speculation_.expect(groups, settles_values() ? forecast_.next(full_scale) : ScaleBounds{full_scale, full_scale});
}

bool Updates::settles_values() const {
  const std::vector<ChunkSpec>& chunks = store_.layout().chunks();
  return !speculation_.is_committing() && std::any_of(chunks.begin(), chunks.end(), [](const ChunkSpec& chunk) {
    return chunk.trainable && chunk.dtype != DType::kFloat32;
  });
}

void Updates::choose_speculation() {
  if (speculation_.must_choose()) choose_chunks();
  speculation_.prepare_open();
}

void Updates::choose_chunks() {
  const Layout& layout = store_.layout();
  std::vector<NewBytes> sizes(static_cast<size_t>(layout.num_chunks()));
  bool any = false;
  for (ChunkId chunk = 0; chunk < layout.num_chunks(); ++chunk) {
    if (disk_.is_home_of(chunk) || !arrays_.has_states(chunk, Tier::kHost)) continue;
    sizes[static_cast<size_t>(chunk)] = new_bytes(layout, chunk);
    any = true;
  }
  if (any) speculation_.choose(layout, sizes);
}

UpdateAt Updates::host_update_at(ChunkId chunk) const {
  if (speculation_.commits()) return disk_.is_home_of(chunk) ? UpdateAt::kDiskAtRetire : UpdateAt::kHostAtRetire;
  if (disk_.is_home_of(chunk)) return UpdateAt::kDiskAfterNorm;
  if (!speculation_.succeeds(chunk)) return UpdateAt::kHostAfterNorm;
  const bool everything = speculation_.ahead(chunk) == Ahead::kEverything && speculation_.expected_scales().is_exact();
  return everything ? UpdateAt::kHostAtRetire : UpdateAt::kHostParamFirst;
}

void Updates::start_early(ChunkId chunk) {
  if (!speculation_.commits()) return early_.start(chunk);
  if (arrays_.has_states(chunk, Tier::kDevice)) return commit_on_device(chunk);
  commit(chunk);
}

void Updates::commit_on_device(ChunkId chunk) {
  if (store_.layout().is_sharded()) chunk = std::exchange(held_back_, chunk);
  if (chunk >= 0) commit(chunk);
}

void Updates::commit(ChunkId chunk) {
  const ArrayRecord& grad = memory_.array(arrays_.grad_of(chunk));
  if (gradients_.source(chunk) != arrays_.grad_of(chunk).kind || !grad.exists() || !gradients_.has_any(chunk)) return;
  // A later use in this step needs the old values.
  const ArrayId param{chunk, ArrayKind::kParam};
  if (pager_.next_use(param) != NextUse::kNever) return;
  // Gradients that have no place to wait in are applied in the first step already.
  if (store_.chunk(chunk).keeps_param()) arrays_.make_states(chunk);
  const auto scale = static_cast<float>(speculation_.expected_scales().most);
  if (arrays_.has_states(chunk, Tier::kDevice)) {
    apply_on_device(chunk, speculation_.expected_groups(), scale);
  } else if (grad.on_device && can_visit(chunk) && visits_.take_room()) {
    apply_by_visit(chunk, speculation_.expected_groups(), scale);
  } else if (arrays_.has_states(chunk, Tier::kHost) && grad.on_host) {
    apply_on_host({chunk}, speculation_.expected_groups(), scale);
  } else {
    return;
  }
  committed_[static_cast<size_t>(chunk)] = 1;
  ++num_committed_;
  ++memory_.counters().num_committed_updates;
}

void Updates::check_nothing_committed(const char* what) const {
  PS_CHECK(
      num_committed_ == 0, StateError, what, " after a backward that has updated ", num_committed_,
      " chunks already (optimizer.speculation is \"commit\"): every backward must be followed by exactly one step, "
      "with the options it began with; set optimizer.speculation to \"auto\"");
}

void Updates::check_not_committed(const std::vector<ParamId>& params) const {
  if (num_committed_ == 0) return;
  for (ParamId param : params) {
    PS_CHECK(!is_committed(store_.layout().placement(param).chunk), StateError, store_.param_name(param),
             " is used again in a backward that has updated it already (optimizer.speculation is \"commit\"); set "
             "optimizer.speculation to \"auto\"");
  }
}

void Updates::forget_committed() {
  std::fill(committed_.begin(), committed_.end(), uint8_t{0});
  num_committed_ = 0;
  held_back_ = -1;
}

void Updates::cancel(ChunkId chunk) {
  if (chunk == held_back_) held_back_ = -1;
  if (is_committed(chunk)) check_nothing_committed("a gradient, a value or a step count was to change");
  speculation_.cancel(chunk);
}

void Updates::fetch_gradients() {
  for (ChunkId chunk = 0; chunk < store_.num_chunks(); ++chunk) {
    const ArrayId grad{chunk, gradients_.source(chunk)};
    const ArrayRecord& record = memory_.array(grad);
    if (grad.kind == ArrayKind::kGradSum || record.on_device || !record.on_host) continue;
    if (!gradients_.has_any(chunk) || !arrays_.has_states(chunk, Tier::kDevice)) continue;
    pager_.prefetch(grad);
    if (!record.slot) return;
  }
}

void Updates::apply(const std::vector<GroupOptions>& groups, double grad_scale, double clip_ratio) {
  const auto scale = static_cast<float>(grad_scale);
  if (groups != speculation_.expected_groups() || !speculation_.expected_scales().contains(grad_scale)) {
    check_nothing_committed("a step with other options");
  }
  forecast_.note(clip_ratio);
  const bool as_expected = early_.begin_step(groups, grad_scale);
  try {
    apply_to_all(groups, scale, as_expected);
  } catch (...) {
    early_.submit_states_passes();
    throw;
  }
  early_.end_step();
  forget_committed();
}

void Updates::apply_to_all(const std::vector<GroupOptions>& groups, float grad_scale, bool as_expected) {
  LateUpdates late;
  for (ChunkId chunk = 0; chunk < store_.num_chunks(); ++chunk) {
    if (!gradients_.has_any(chunk) || is_committed(chunk)) continue;
    if (as_expected && early_.has(chunk)) {
      early_.take_over(chunk, groups, grad_scale);
      ++memory_.counters().num_updates_taken_over;
    } else if (arrays_.belongs_on_device(chunk) || !pager_.push_out({chunk, gradients_.source(chunk)})) {
      apply_on_device(chunk, groups, grad_scale);
    } else if (early_.start_after_all(chunk, groups, grad_scale)) {
      early_.take_over(chunk, groups, grad_scale);
    } else {
      // Downloads of all chunks are under way before the first update waits for one.
      (disk_.is_home_of(chunk) ? late.on_disk : late.on_host).push_back(chunk);
    }
  }
  apply_late(late, groups, grad_scale);
}

void Updates::apply_late(const LateUpdates& late, const std::vector<GroupOptions>& groups, float grad_scale) {
  std::vector<ChunkId> batch;
  int64_t numel = 0;
  const auto apply_batch = [&] {
    if (!batch.empty()) apply_on_host(std::exchange(batch, {}), groups, grad_scale);
    numel = 0;
  };
  for (ChunkId chunk : late.on_host) {
    if (!batch.empty() && speculation_.is_late(chunk) != speculation_.is_late(batch.front())) apply_batch();
    batch.push_back(chunk);
    numel += store_.chunk(chunk).numel;
    if (numel >= kBatchNumel) apply_batch();
  }
  apply_batch();
  for (ChunkId chunk : late.on_disk) apply_on_host({chunk}, groups, grad_scale);
}

void Updates::apply_on_device(ChunkId chunk, const std::vector<GroupOptions>& groups, float grad_scale) {
  std::vector<ArrayId> used{{chunk, gradients_.source(chunk)}};
  for (ArrayKind kind : store_.chunk(chunk).state_kinds()) used.push_back({chunk, kind});
  if (store_.chunk(chunk).keeps_param()) used.push_back(arrays_.param_of(chunk));
  std::vector<ScopedHold> holds;
  for (ArrayId id : used) holds.emplace_back(memory_.array(id));
  for (ArrayKind kind : store_.chunk(chunk).state_kinds()) pager_.ensure_state({chunk, kind}, Tier::kDevice);
  for (ArrayId id : used) pager_.bring(id);
  const UpdateTarget target = open_target(chunk, /*on_device=*/true);
  std::vector<optim::UpdateJob> jobs;
  jobs_.add(chunk, target, groups, grad_scale, jobs);
  {
    const TraceScope span(memory_.tracer(), update_label(Track::kDeviceAdam, chunk, jobs));
    for (const Restore& restore : jobs_.restores(chunk, target)) {
      memory_.device_compute().cast_from_float(restore.in, restore.out, restore.dtype, restore.numel);
    }
    memory_.device_compute().update(jobs);
  }
  for (ArrayKind kind : store_.chunk(chunk).state_kinds()) memory_.array({chunk, kind}).set_on_device();
  holds.clear();
  close_target(chunk, target);
}

bool Updates::visits_early(ChunkId chunk) {
  const bool is_dead = pager_.next_use({chunk, ArrayKind::kParam}) == NextUse::kNever;
  return speculation_.commits() && is_dead && can_visit(chunk) && visits_.take_room();
}

// Not where a parameter without a gradient has its new value made of its master.
bool Updates::can_visit(ChunkId chunk) const {
  if (!visits_.is_chosen(chunk) || disk_.is_home_of(chunk)) return false;
  const ArrayId grad = arrays_.grad_of(chunk);
  if (gradients_.source(chunk) != grad.kind || !arrays_.has_states(chunk, Tier::kHost)) return false;
  const ChunkSpec& spec = store_.chunk(chunk);
  const auto has_gradient = [this](ParamId param) { return gradients_.has(param); };
  const bool is_whole = spec.keeps_param() || std::all_of(spec.params.begin(), spec.params.end(), has_gradient);
  return is_whole;
}

void Updates::apply_by_visit(ChunkId chunk, const std::vector<GroupOptions>& groups, float grad_scale) {
  const ChunkSpec& spec = store_.chunk(chunk);
  const ArrayId param_id = arrays_.param_of(chunk);
  ArrayRecord& grad = memory_.array(arrays_.grad_of(chunk));
  ArrayRecord& param = memory_.array(param_id);
  const ScopedHold hold(grad);
  Visit visit;
  visit.chunk = chunk;
  visit.grad = grad.slot.data;
  const bool is_computed = !store_.layout().is_sharded();  // else it was scattered
  visit.grad_ready = is_computed ? memory_.backend().record(Queue::kCompute) : grad.device_ready;
  for (ArrayKind kind : spec.state_kinds()) {
    const ArrayRecord& state = memory_.array({chunk, kind});
    visit.after.push_back(state.host_ready);
    visit.after.push_back(state.block_busy_until);
  }
  if (spec.keeps_param()) {
    arrays_.bring_value_to_host(chunk, visit.after);
    if (param.on_device) {
      visit.value = param.slot.data;
      visit.value_ready = param.device_ready;
    }
  } else {
    memory_.discard(param_id);
    pager_.ensure_block(param_id);
  }
  if (param_id.kind != ArrayKind::kParam) memory_.discard({chunk, ArrayKind::kParam});
  visit.param = param.block.data;
  UpdateTarget target{};
  target.grad = visit.grad;
  target.grad_dtype = spec.dtype;
  target.param = visit.param;
  jobs_.add(chunk, target, groups, grad_scale, visit.jobs);
  const VisitEvents events = visits_.update(visit);
  for (ArrayKind kind : spec.state_kinds()) {
    ArrayRecord& state = memory_.array({chunk, kind});
    state.host_ready = events.down;
    state.block_busy_until = nullptr;
  }
  grad.slot.busy.copied = events.used;
  memory_.discard(arrays_.grad_of(chunk));
  if (visit.value != nullptr) param.slot.busy.copied = events.used;
  if (spec.keeps_param()) memory_.drop_slot(param_id);
  param.host_ready = events.down;
  param.set_on_host();
  jobs_.count_step(chunk);
  arrays_.note_new_values(chunk);
}

std::optional<std::vector<HostBlock>> Updates::new_params(const std::vector<ChunkId>& chunks) {
  if (!speculation_.allows_passes() || disk_.is_home_of(chunks.front())) return std::nullopt;
  if (speculation_.is_late(chunks.front())) return std::nullopt;
  const bool any_in_place = std::any_of(chunks.begin(), chunks.end(),
                                        [this](ChunkId chunk) { return store_.chunk(chunk).puts_values_in_place(); });
  if (any_in_place) return std::nullopt;
  std::vector<HostBlock> blocks(chunks.size());
  for (size_t i = 0; i < chunks.size(); ++i) {
    if (gradients_.source(chunks[i]) != arrays_.grad_of(chunks[i]).kind) continue;
    blocks[i] = speculation_.try_allocate_param(store_.num_bytes(arrays_.param_of(chunks[i])));
    if (!blocks[i]) return std::nullopt;
  }
  return blocks;
}

void Updates::apply_on_host(const std::vector<ChunkId>& chunks, const std::vector<GroupOptions>& groups,
                            float grad_scale) {
  std::optional<std::vector<HostBlock>> params = new_params(chunks);
  std::vector<UpdateTarget> targets;
  const bool on_disk = disk_.is_home_of(chunks.front());
  HostUpdate update;
  update.chunk = chunks.front();
  // Those of the disk pass through sets of memory in turn.
  update.turn = on_disk ? Turn::kInOrder : Turn::kOfNeed;
  for (size_t i = 0; i < chunks.size(); ++i) {
    const ChunkId chunk = chunks[i];
    const ArrayId grad{chunk, gradients_.source(chunk)};
    pager_.send_to_host(grad);
    bring_states_to_host(chunk, update);
    update.after.push_back(memory_.array(grad).host_ready);
    if (store_.chunk(chunk).keeps_param()) arrays_.bring_value_to_host(chunk, update.after);
    UpdateTarget target = open_target(chunk, /*on_device=*/false);
    if (params && (*params)[i]) {
      target.param = (*params)[i].data;
      target.place = ParamPlace::kNew;
    }
    for (const Restore& restore : jobs_.restores(chunk, target)) update.restores.push_back(restore);
    jobs_.add(chunk, target, groups, grad_scale, update.jobs);
    targets.push_back(target);
  }
  StatesPass rest;
  if (params) {
    update.pass = Pass::kParam;
    rest.chunks = chunks;
    rest.update.jobs = update.jobs;
  }
  const Event done = (on_disk ? disk_updates_ : host_updates_).submit(std::move(update));
  rest.update.after = {done};
  for (size_t i = 0; i < chunks.size(); ++i) {
    const ChunkId chunk = chunks[i];
    close_target(chunk, targets[i]);
    ArrayRecord& param = memory_.array(arrays_.param_of(chunk));
    param.host_ready = done;
    if (targets[i].place == ParamPlace::kNew) {
      param.block = std::move((*params)[i]);
      rest.gradients.push_back(arrays_.take_gradient(chunk));
    }
    if (params) continue;
    for (ArrayKind kind : store_.chunk(chunk).state_kinds()) {
      memory_.array({chunk, kind}).host_ready = done;
      memory_.array({chunk, kind}).set_on_host();
    }
    if (on_disk) disk_.store_updated(chunk);
    if (gradients_.source(chunk) == ArrayKind::kGradSum) {
      memory_.array({chunk, ArrayKind::kGradSum}).block_busy_until = done;
    } else if (targets[i].place == ParamPlace::kOwn) {
      arrays_.leave_gradient(chunk, done);
    }
  }
  if (params) early_.add(std::move(rest));
}

void Updates::bring_states_to_host(ChunkId chunk, HostUpdate& update) {
  const bool on_disk = disk_.is_home_of(chunk);
  if (on_disk) disk_.fetch(chunk);
  for (ArrayKind kind : store_.chunk(chunk).state_kinds()) {
    const ArrayId id{chunk, kind};
    pager_.ensure_state(id, Tier::kHost);
    if (!on_disk) {
      pager_.bring_to_host(id);
      continue;
    }
    const ArrayRecord& record = memory_.array(id);
    update.after.push_back(record.block_busy_until);
    if (record.host_ready != nullptr) update.states.push_back(record.host_ready);
  }
}

UpdateTarget Updates::open_target(ChunkId chunk, bool on_device) {
  const ArrayId grad{chunk, gradients_.source(chunk)};
  const ArrayId param = arrays_.param_of(chunk);
  const ArrayRecord& record = memory_.array(grad);
  const bool is_own = grad.kind == arrays_.grad_of(chunk).kind;
  UpdateTarget target{};
  target.on_device = on_device;
  target.place = is_own && !store_.chunk(chunk).keeps_param() ? ParamPlace::kGradient : ParamPlace::kOwn;
  target.grad_dtype = is_own ? store_.chunk(chunk).dtype : DType::kFloat32;
  target.grad = on_device ? record.slot.data : record.block.data;
  if (param.kind != ArrayKind::kParam) memory_.discard({chunk, ArrayKind::kParam});
  if (target.place == ParamPlace::kGradient) {
    memory_.discard(param);
    target.param = const_cast<void*>(target.grad);
  } else if (on_device) {
    target.param = pager_.open_for_write(param);
  } else {
    memory_.drop_slot(param);
    pager_.ensure_block(param);
    memory_.await_on_host(param);
    target.param = memory_.array(param).block.data;
  }
  return target;
}

void Updates::close_target(ChunkId chunk, const UpdateTarget& target) {
  jobs_.count_step(chunk);
  const ArrayId param_id = arrays_.param_of(chunk);
  ArrayRecord& param = memory_.array(param_id);
  ArrayRecord& grad = memory_.array(arrays_.grad_of(chunk));
  const bool in_gradient = target.place == ParamPlace::kGradient;
  if (in_gradient && target.on_device) {
    param.slot = std::exchange(grad.slot, {});
    param.device_ready = std::exchange(grad.device_ready, nullptr);
    grad.on_device = false;
  } else if (in_gradient) {
    param.block = std::exchange(grad.block, {});
    grad.host_ready = nullptr;
    grad.on_host = false;
  }
  if (target.on_device && store_.layout().is_sharded() && !store_.chunk(chunk).keeps_param()) {
    memory_.discard(param_id);  // gathers take it from the master
  } else if (target.on_device) {
    param.set_on_device();
    if (param_id.kind == ArrayKind::kParam) memory_.attach(chunk);
    if (target.place == ParamPlace::kOwn) memory_.discard(arrays_.grad_of(chunk));
  } else {
    param.set_on_host();
  }
  arrays_.note_new_values(chunk);
}

}  // namespace patrickstar
