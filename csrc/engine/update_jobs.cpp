#include "engine/update_jobs.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <optional>
#include <utility>

#include "common/ablation.h"
#include "common/check.h"

namespace patrickstar {

namespace {

// Seed of stochastic rounding in states of fewer bytes; fixed, so that runs repeat.
constexpr uint64_t kRandomSeed = 0;

// `whole`: for one-phase updates.
Track track_of(Pass pass, Track whole) {
  switch (pass) {
    case Pass::kStates:
    case Pass::kPutStates:
      return Track::kHostStates;
    case Pass::kScaleDependent:
    case Pass::kPutScaleDependent:
    case Pass::kTakeBack:
      return Track::kHostOpen;
    case Pass::kWhole:
    case Pass::kParam:
    case Pass::kBetween:
    case Pass::kPut:
      break;
  }
  return whole;
}

}  // namespace

UpdateJobs::UpdateJobs(const ChunkStore& store, const Gradients& gradients, const MatrixUpdates& matrices)
    : store_(store),
      gradients_(gradients),
      matrices_(matrices),
      group_of_(static_cast<size_t>(store.layout().num_params()), 0),
      step_counts_(group_of_.size(), 0) {}

void UpdateJobs::count_step(ChunkId chunk) {
  for (ParamId param : store_.layout().chunk(chunk).params) {
    if (gradients_.has(param)) ++step_counts_[static_cast<size_t>(param)];
  }
}

std::vector<Restore> UpdateJobs::restores(ChunkId chunk, const UpdateTarget& target) const {
  const Layout& layout = store_.layout();
  if (layout.chunk(chunk).rows.param().source != Source::kMaster) return {};
  const DType dtype = layout.chunk(chunk).dtype;
  const ArrayRecord& master = store_.array({chunk, ArrayKind::kMaster});
  const auto* from = static_cast<const float*>(target.on_device ? master.device_buffer.data : master.block.data);
  std::vector<Restore> result;
  for (ParamId param : layout.chunk(chunk).params) {
    const ParamShard shard = layout.shard_of(param);
    if (gradients_.has(param) || shard.numel == 0) continue;
    result.push_back({from + shard.offset, element_at(target.param, shard.offset, dtype), dtype, shard.numel});
  }
  return result;
}

std::vector<Carry> UpdateJobs::carries(ChunkId chunk, const NewValues& values) const {
  if (!values.has_states()) return {};
  const Layout& layout = store_.layout();
  const ChunkSpec& spec = layout.chunk(chunk);
  std::vector<Carry> result;
  for (ParamId param : spec.params) {
    const ParamShard shard = layout.shard_of(param);
    if (gradients_.has(param) || shard.numel == 0) continue;
    auto block = values.states.begin();
    for (ArrayKind kind : spec.state_kinds()) {
      const StateType type = spec.states.of(kind);
      const StatePlace from = spec.state_place(kind, store_.array({chunk, kind}).block.data, shard.offset);
      const StatePlace to = spec.state_place(kind, (block++)->data, shard.offset);
      result.push_back({from.data, to.data, state_offset(type, shard.numel)});
      if (from.scales != nullptr) result.push_back({from.scales, to.scales, num_state_blocks(shard.numel) * 4});
    }
  }
  return result;
}

void UpdateJobs::add(ChunkId chunk, const UpdateTarget& target, const std::vector<GroupOptions>& groups,
                     float grad_scale, std::vector<optim::UpdateJob>& jobs) const {
  const Layout& layout = store_.layout();
  const ChunkSpec& spec = layout.chunk(chunk);
  const auto array = [&](ArrayKind kind) {
    const ArrayRecord& record = store_.array({chunk, kind});
    return static_cast<char*>(target.on_device ? record.device_buffer.data : record.block.data);
  };
  const auto state = [&](ArrayKind kind, int64_t offset) { return spec.state_place(kind, array(kind), offset); };
  const auto new_state = [&](ArrayKind kind, int64_t offset) {
    if (target.apart == nullptr || !spec.states.has(kind)) return StatePlace{};
    const StateKinds kinds = spec.state_kinds();
    const auto index = static_cast<size_t>(std::find(kinds.begin(), kinds.end(), kind) - kinds.begin());
    return spec.state_place(kind, target.apart->states[index].data, offset);
  };
  const bool draws = spec.draws_random_bits();
  // Neighbours with the same group and step count form one range, unless they draw random bits or are whole matrices.
  int64_t end = -1;
  std::pair<int, int64_t> last_key{-1, -1};
  for (ParamId param : spec.params) {
    const ParamShard shard = layout.shard_of(param);
    if (!gradients_.has(param) || shard.numel == 0) continue;
    const int64_t offset = shard.offset;
    const int64_t numel = shard.numel;
    const int group = group_of_[static_cast<size_t>(param)];
    const std::pair<int, int64_t> key{group, step_counts_[static_cast<size_t>(param)] + 1};
    const bool is_matrix = matrices_.has(param);
    if (offset == end && key == last_key && !draws && !is_matrix) {
      jobs.back().range.numel += numel;
    } else {
      const StatePlace momentum = state(ArrayKind::kMomentum, offset);
      const StatePlace variance = state(ArrayKind::kVariance, offset);
      const StatePlace new_momentum = new_state(ArrayKind::kMomentum, offset);
      const StatePlace new_variance = new_state(ArrayKind::kVariance, offset);
      optim::AdamRange range{state(ArrayKind::kMaster, offset).data,
                             momentum.data,
                             variance.data,
                             element_at(target.grad, offset, target.grad_dtype),
                             element_at(target.param, offset, spec.dtype),
                             target.grad_dtype,
                             spec.dtype,
                             numel};
      range.new_master = static_cast<float*>(new_state(ArrayKind::kMaster, offset).data);
      range.new_momentum = new_momentum.data;
      range.new_variance = new_variance.data;
      range.master_type = spec.states.master;
      range.momentum_type = spec.states.momentum;
      range.variance_type = spec.states.variance;
      range.momentum_scales = momentum.scales;
      range.variance_scales = variance.scales;
      range.new_momentum_scales = new_momentum.scales;
      range.new_variance_scales = new_variance.scales;
      range.key = optim::random_key(kRandomSeed, key.second, param, shard.begin);
      const GroupOptions& options = groups[static_cast<size_t>(group)];
      PS_CHECK(keeps_variance(options) == spec.states.has(ArrayKind::kVariance), StateError, store_.param_name(param),
               " is updated by a rule that keeps ", keeps_variance(options) ? "a" : "no",
               " variance, and its chunk was made for another one; build the engine with the optimizer that steps");
      jobs.push_back({range, scalars_of(options, key.second, grad_scale)});
      if (is_matrix) jobs.back().scalars = matrices_.scalars(param, options, grad_scale, target.scratch);
    }
    end = is_matrix ? -1 : offset + numel;
    last_key = key;
  }
}

SpanLabel update_label(Track track, ChunkId first_chunk, const std::vector<optim::UpdateJob>& jobs) {
  SpanLabel label{track, StallCause::kNone, {first_chunk, ArrayKind::kMaster}};
  for (const optim::UpdateJob& job : jobs) label.numel += job.range.numel;
  return label;
}

Event HostUpdates::submit(std::shared_ptr<const HostUpdate> update) {
  const SpanLabel label = update_label(track_of(update->pass, track_), update->chunk, update->jobs);
  const std::shared_ptr<HostSpan> span = tracer_.open_host_span(label, update->cancelled);
  UnsubmittedSpan unsubmitted(span.get());
  std::optional<Need> need;
  if (update->turn == Turn::kOfNeed && !is_left_out(Mechanism::kOrderOfNeed))
    need = Need{update->chunk, [this, update] { return is_ready(*update); }};
  Event done = queue_.submit(
      [this, span, update] {
        const HostSpanEnd end(span.get());
        if (!update->is_cancelled()) run(*update, span.get());
      },
      std::move(need));
  unsubmitted.submitted();
  return done;
}

bool HostUpdates::is_ready(const HostUpdate& update) const {
  const auto is_over = [this](const Event& event) { return backend_.is_over(event); };
  return update.is_cancelled() || (std::all_of(update.after.begin(), update.after.end(), is_over) &&
                                   std::all_of(update.states.begin(), update.states.end(), is_over));
}

void HostUpdates::run(const HostUpdate& update, HostSpan* span) {
  for (const Event& event : update.after) backend_.synchronize(event);
  await_states(update);
  const HostSpanScope scope(span);
  for (const Restore& restore : update.restores) {
    compute_.cast_from_float(restore.in, restore.out, restore.dtype, restore.numel);
  }
  for (const Carry& carry : update.carries) {
    std::memcpy(carry.out, carry.in, static_cast<size_t>(carry.num_bytes));
  }
  switch (update.pass) {
    case Pass::kWhole:
    case Pass::kStates:
      return compute_.update(update.jobs);
    case Pass::kParam:
      return compute_.update_param(update.jobs);
    case Pass::kBetween:
      return compute_.update_param_between(update.jobs);
    case Pass::kScaleDependent:
      return compute_.update_param_scale_dependent(update.jobs);
    case Pass::kPut:
      return compute_.put_values(update.jobs);
    case Pass::kPutScaleDependent:
      return compute_.put_scale_dependent_values(update.jobs);
    case Pass::kPutStates:
      return compute_.put_states(update.jobs);
    case Pass::kTakeBack:
      return compute_.take_values_back(update.jobs);
  }
}

void HostUpdates::await_states(const HostUpdate& update) {
  if (update.states.empty()) return;
  const TraceClock::time_point begin = TraceClock::now();
  for (const Event& event : update.states) backend_.synchronize(event);
  waited_nanoseconds_ += std::chrono::nanoseconds(TraceClock::now() - begin).count();
}

}  // namespace patrickstar
