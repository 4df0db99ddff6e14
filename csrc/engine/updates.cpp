#include "engine/updates.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "common/ablation.h"
#include "common/check.h"

namespace patrickstar {

namespace {

// Least elements of a batch of chunks updated on the host, so that small chunks keep all threads busy. Not measured.
constexpr int64_t kBatchNumel = int64_t{4} << 20;

}  // namespace

Updates::Updates(Pager& pager, const Gradients& gradients, MatrixUpdates& matrices, HostUpdates& host_updates,
                 HostUpdates& disk_updates, Speculation& speculation, UpdateStates& states)
    : pager_(pager),
      memory_(pager.memory()),
      store_(pager.store()),
      gradients_(gradients),
      matrices_(matrices),
      disk_(pager.disk()),
      speculation_(speculation),
      arrays_(pager, speculation),
      jobs_(store_, gradients, matrices),
      states_(states),
      early_(pager, gradients, host_updates, speculation, jobs_, arrays_, states_),
      chunk_updates_(
          {pager, gradients, matrices, host_updates, disk_updates, speculation, arrays_, jobs_, early_, states_}) {}

void Updates::set_step_count(ParamId param, int64_t count) {
  cancel(store_.layout().placement(param).chunk);
  jobs_.set_step_count(param, count);
}

void Updates::expect(const std::vector<GroupOptions>& groups, double full_scale) {
  held_back_ = -1;
  speculation_.expect(groups, settles_values() ? forecast_.next(full_scale) : ScaleBounds{full_scale, full_scale});
}

bool Updates::settles_values() const {
  if (is_left_out(Mechanism::kScaleIndependentValues)) return false;
  const std::vector<ChunkSpec>& chunks = store_.layout().chunks();
  return !speculation_.is_committing() && std::any_of(chunks.begin(), chunks.end(), [](const ChunkSpec& chunk) {
    return chunk.trainable && chunk.dtype != DType::kFloat32;
  });
}

void Updates::choose_speculation() {
  if (speculation_.must_choose()) choose_chunks();
  speculation_.prepare_scale_dependent();
}

void Updates::choose_chunks() {
  const Layout& layout = store_.layout();
  std::vector<Tier> states;
  for (ChunkId chunk = 0; chunk < layout.num_chunks(); ++chunk) {
    const Tier on = arrays_.has_states(chunk, Tier::kHost) ? Tier::kHost : Tier::kDevice;
    states.push_back(disk_.is_resting_tier_of(chunk) ? Tier::kDisk : on);
  }
  const bool any = std::find(states.begin(), states.end(), Tier::kHost) != states.end();
  if (!any) return;
  std::vector<NewBytes> sizes = new_bytes_on_host(layout, states);
  for (ChunkId chunk = 0; chunk < layout.num_chunks(); ++chunk) {
    // no speculative updates for matrices
    if (unit_of(chunk) == UpdateUnit::kMatrix) sizes[static_cast<size_t>(chunk)] = {};
  }
  speculation_.choose(layout, sizes);
}

ExpectedScale Updates::expected_scale() const {
  return speculation_.expected_scales().is_exact() ? ExpectedScale::kExact : ExpectedScale::kBetween;
}

ExpectedScale Updates::next_scale(double clip_ratio) const {
  ScaleForecast forecast = forecast_;
  forecast.note(clip_ratio);
  return !settles_values() || forecast.next(1.0).is_exact() ? ExpectedScale::kExact : ExpectedScale::kBetween;
}

Recipe Updates::earliest(ChunkId chunk, UpdateStart start) const {
  const ChunkSpec& spec = store_.chunk(chunk);
  const Tier off_device = disk_.is_resting_tier_of(chunk) ? Tier::kDisk : Tier::kHost;
  const Tier states = store_.has_states_on_device(chunk) ? Tier::kDevice : off_device;
  const Recipe recipe = earliest_recipe({spec.trainable, spec.dtype, states, speculation_.ahead(chunk), unit_of(chunk)},
                                        start, expected_scale());
  return speculation_.is_paused() ? after_norm(recipe) : recipe;
}

Recipe Updates::recipe(ChunkId chunk) const {
  const Recipe possible = earliest(chunk, earliest_start());
  return planned_.empty() ? possible : later_of(planned_[static_cast<size_t>(chunk)], possible, unit_of(chunk));
}

Passes Updates::passes_after_norm(ChunkId chunk) const { return row_of(after_norm(recipe(chunk))).passes; }

void Updates::follow(std::vector<Recipe> recipes, int64_t piece_numel) {
  planned_ = std::move(recipes);
  if (!any_round_trips(planned_)) chunk_updates_.round_trips().leave_room();
  chunk_updates_.round_trips().set_piece_numel(piece_numel);
}

Recipe Updates::early_recipe(ChunkId chunk) {
  const Recipe chosen = recipe(chunk);
  if (!is_round_trip(row_of(chosen))) return chosen;
  const bool is_dead = pager_.next_use({chunk, ArrayKind::kParam}) == NextUse::kNever;
  const bool round_trips = is_dead && chunk_updates_.can_round_trip(chunk) && chunk_updates_.round_trips().take_room();
  return round_trips ? chosen : without_round_trip(chosen);
}

void Updates::start_early(Op op, ChunkId chunk) {
  // On its way, the gradient may have taken the memory that the recipe was chosen for.
  const RecipeRow& row = row_of(recipe(chunk));
  if (row.start == Start::kAhead) return early_.start(chunk, row.passes);
  if (row.start != Start::kCommitted) return;
  switch (op) {
    case Op::kUpdateDevice:
      if (store_.chunk(chunk).is_sharded()) chunk = std::exchange(held_back_, chunk);
      if (chunk >= 0) commit(op, chunk);
      return;
    case Op::kLoad:  // parts of other updates
    case Op::kStore:
    case Op::kRoundTripDown:
      return;
    default:
      return commit(op, chunk);
  }
}

void Updates::commit(Op op, ChunkId chunk) {
  const ArrayRecord& grad = memory_.array(arrays_.grad_of(chunk));
  if (gradients_.source(chunk) != arrays_.grad_of(chunk).kind || !grad.exists() || !gradients_.has_any(chunk)) return;
  // A later use in this step needs the old values.
  const ArrayId param{chunk, ArrayKind::kParam};
  if (pager_.next_use(param) != NextUse::kNever) return;
  // Gradients without reserved memory are applied in the first step already.
  if (!arrays_.derives_value(chunk)) arrays_.make_states(chunk);
  const auto scale = static_cast<float>(speculation_.expected_scales().most);
  if (op == Op::kUpdateDevice && arrays_.has_states(chunk, Tier::kDevice)) {
    chunk_updates_.on_device(chunk, speculation_.expected_groups(), scale);
    note_made({Start::kCommitted, Tier::kDevice, Tier::kDevice});
  } else if (op == Op::kRoundTripUp && grad.on_device) {
    chunk_updates_.by_round_trip(chunk, speculation_.expected_groups(), scale);
    note_made({Start::kCommitted, Tier::kHost, Tier::kDevice});
  } else if (op != Op::kUpdateDevice && arrays_.has_states(chunk, Tier::kHost) && grad.on_host) {
    chunk_updates_.on_host({chunk}, Passes::kOne, speculation_.expected_groups(), scale);
    note_made({Start::kCommitted, disk_.is_resting_tier_of(chunk) ? Tier::kDisk : Tier::kHost, Tier::kHost});
  }
}

void Updates::note_made(const UpdateWay& way) { memory_.counters().count_update(recipe_of(way)); }

const char* Updates::how_committed() const {
  return speculation_.commits()
             ? " in its backward (optimizer.speculation is \"commit\"): every backward must be followed "
               "by exactly one step, with the options it began with; take that step or load a checkpoint, or set "
               "optimizer.speculation to \"auto\""
             : " before it failed: call optimizer.step() again to finish it, or load a checkpoint";
}

void Updates::check_nothing_committed(const char* what) const {
  PS_CHECK(num_committed() == 0, StateError, what, " in a step that has updated ", num_committed(), " chunks already",
           how_committed());
}

void Updates::check_not_committed(const std::vector<ParamId>& params) const {
  if (num_committed() == 0) return;
  for (ParamId param : params) {
    PS_CHECK(!states_.is_made(store_.layout().placement(param).chunk), StateError, store_.param_name(param),
             " is used again in a step that has updated it already", how_committed());
  }
}

void Updates::forget_committed() {
  states_.end_step();
  held_back_ = -1;
}

void Updates::drop_step() {
  early_.drop_states_passes();
  forget_committed();
  cancel_all();
}

void Updates::cancel(ChunkId chunk) {
  if (chunk == held_back_) held_back_ = -1;
  if (states_.is_made(chunk)) check_nothing_committed("a gradient, a value or a step count was to change");
  speculation_.cancel(chunk);
}

void Updates::fetch_gradients() {
  for (ChunkId chunk = 0; chunk < store_.num_chunks(); ++chunk) {
    const ArrayId grad{chunk, gradients_.source(chunk)};
    const ArrayRecord& record = memory_.array(grad);
    if (grad.kind == ArrayKind::kGradSum || record.on_device || !record.on_host) continue;
    if (!gradients_.has_any(chunk) || !arrays_.has_states(chunk, Tier::kDevice)) continue;
    pager_.prefetch(grad);
    if (!record.device_buffer) return;
  }
}

void Updates::check_step(const std::vector<GroupOptions>& groups, double grad_scale) const {
  if (groups == speculation_.expected_groups() && speculation_.expected_scales().contains(grad_scale)) return;
  check_nothing_committed("a step with other options");
}

void Updates::apply(const std::vector<GroupOptions>& groups, double grad_scale, double clip_ratio) {
  const auto scale = static_cast<float>(grad_scale);
  forecast_.note(clip_ratio);
  const bool as_expected = early_.begin_step(groups, grad_scale);
  try {
    apply_to_all(groups, scale, as_expected);
  } catch (...) {
    submit_what_is_left();
    throw;
  }
  early_.end_step();
}

// Phase-two updates that fail here are submitted when the step is repeated.
void Updates::submit_what_is_left() noexcept {
  try {
    early_.submit_states_passes();
  } catch (const std::exception&) {
  }
}

void Updates::apply_to_all(const std::vector<GroupOptions>& groups, float grad_scale, bool as_expected) {
  DeferredUpdates late;
  for (ChunkId chunk = 0; chunk < store_.num_chunks(); ++chunk) {
    if (!gradients_.has_any(chunk) || states_.is_made(chunk)) continue;
    if (as_expected && early_.has(chunk)) {
      const Passes passes = early_.take_over(chunk, groups, grad_scale);
      note_made({Start::kAhead, Tier::kHost, Tier::kHost, passes});
    } else if (arrays_.belongs_on_device(chunk) || !pager_.push_out({chunk, gradients_.source(chunk)})) {
      chunk_updates_.on_device(chunk, groups, grad_scale);
      note_made({Start::kAfterNorm, Tier::kDevice, Tier::kDevice});
    } else if (passes_after_norm(chunk) == Passes::kTwo && early_.start_after_all(chunk, groups, grad_scale)) {
      early_.take_over(chunk, groups, grad_scale);
      note_made({Start::kAfterNorm, Tier::kHost, Tier::kHost, Passes::kTwo});
    } else {
      // Downloads of all chunks start before the first update waits for one.
      (disk_.is_resting_tier_of(chunk) ? late.on_disk : late.on_host).push_back(chunk);
    }
  }
  apply_deferred(late, groups, grad_scale);
}

void Updates::apply_deferred(const DeferredUpdates& late, const std::vector<GroupOptions>& groups, float grad_scale) {
  std::vector<ChunkId> batch;
  int64_t numel = 0;
  const auto apply_batch = [&] {
    if (batch.empty()) return;
    const Passes passes = chunk_updates_.on_host(batch, passes_after_norm(batch.front()), groups, grad_scale);
    for (size_t i = 0; i < batch.size(); ++i) note_made({Start::kAfterNorm, Tier::kHost, Tier::kHost, passes});
    batch.clear();
    numel = 0;
  };
  for (ChunkId chunk : late.on_host) {
    if (!batch.empty() && passes_after_norm(chunk) != passes_after_norm(batch.front())) apply_batch();
    batch.push_back(chunk);
    numel += store_.chunk(chunk).numel;
    if (numel >= kBatchNumel) apply_batch();
  }
  apply_batch();
  for (ChunkId chunk : late.on_disk) {
    chunk_updates_.on_host({chunk}, Passes::kOne, groups, grad_scale);
    note_made({Start::kAfterNorm, Tier::kDisk, Tier::kHost});
  }
}

}  // namespace patrickstar
