#include "engine/plan_replay.h"

#include <algorithm>
#include <utility>

namespace patrickstar {

void PlanReplay::set_path(const StepPath* path) {
  path_ = path;
  if (!has_plan()) course_ = Course::kNone;
}

void PlanReplay::restart(const Layout& layout) {
  course_ = has_plan() ? Course::kExact : Course::kNone;
  next_ = phase_begin_ = 0;
  num_phases_ = next_scatter_ = 0;
  activation_levels_.assign(has_plan() ? timeline().accesses.size() : 0, 0);
  phase_end_ = static_cast<int64_t>(activation_levels_.size());
  list_scatters(layout);
}

void PlanReplay::switch_to(const StepPath& path, const Layout& layout) {
  path_ = &path;
  activation_levels_.resize(timeline().accesses.size(), 0);
  phase_end_ = num_phases_ == 0 ? next_ : timeline().phase_ends[num_phases_ - 1];
  list_scatters(layout);
  const auto is_due_later = [this](const Scatter& scatter) { return scatter.access >= next_; };
  next_scatter_ =
      static_cast<size_t>(std::find_if(scatters_.begin(), scatters_.end(), is_due_later) - scatters_.begin());
}

void PlanReplay::list_scatters(const Layout& layout) {
  scatters_.clear();
  if (!has_plan() || !layout.has_other_ranks()) return;
  for (size_t t = 0; t < timeline().accesses.size(); ++t) {
    for (const ArrayUse& use : timeline().accesses[t].uses) {
      const bool is_scatter = use.mode == ArrayUseMode::kFinalise && use.array.kind == ArrayKind::kGrad;
      if (is_scatter && layout.chunk(use.array.chunk).is_sharded())
        scatters_.push_back({static_cast<int64_t>(t), use.array.chunk});
    }
  }
}

void PlanReplay::end_step() {
  if (is_running()) course_ = Course::kReady;
}

int64_t PlanReplay::end_of(size_t num_phases_before, int64_t begin, Phase phase) const {
  const std::vector<Access>& accesses = timeline().accesses;
  const std::vector<int64_t>& phase_ends = timeline().phase_ends;
  if (phase_ends.empty()) {
    const auto first = accesses.begin() + begin;
    const auto end =
        std::find_if(first, accesses.end(), [phase](const Access& access) { return access.phase != phase; });
    return first == end ? -1 : end - accesses.begin();
  }
  if (num_phases_before >= phase_ends.size()) return -1;
  const int64_t end = std::max(begin, phase_ends[num_phases_before]);
  return begin == end || accesses[static_cast<size_t>(begin)].phase == phase ? end : -1;
}

bool PlanReplay::begin_phase(Phase phase) {
  const int64_t end = end_of(num_phases_, next_, phase);
  if (end < 0) return false;
  phase_begin_ = next_;
  phase_end_ = end;
  ++num_phases_;
  return true;
}

bool PlanReplay::matches(int64_t access, Phase phase, const std::vector<ArrayId>& acquired) const {
  const Access& planned = timeline().accesses[static_cast<size_t>(access)];
  return planned.phase == phase && planned.acquired == acquired;
}

bool PlanReplay::is_next(Phase phase, const std::vector<ArrayId>& acquired) const {
  return next_ < phase_end_ && matches(next_, phase, acquired);
}

// An access that repeats an earlier one of this phase counts as between planned ones. A later planned access with the
// same arrays more likely belongs to another layer. An access that repeats none is the model's next layer.
PlanReplay::Position PlanReplay::find(Phase phase, const std::vector<ArrayId>& acquired, bool is_there) const {
  if (is_next(phase, acquired)) return {Fit::kNext, next_};
  const auto find_in = [&](int64_t begin, int64_t end) {
    while (begin < end && !matches(begin, phase, acquired)) ++begin;
    return begin;
  };
  if (is_there && find_in(phase_begin_, next_) < next_) return {Fit::kBetween};
  const int64_t later = find_in(next_, phase_end_);
  if (later < phase_end_) return {Fit::kLater, later};
  return {is_there ? Fit::kBetween : Fit::kNone};
}

void PlanReplay::note_skipped() {
  if (course_ == Course::kExact) course_ = Course::kSkipping;
}

std::optional<ChunkId> PlanReplay::due_scatter() const {
  if (!is_running() || next_scatter_ == scatters_.size()) return std::nullopt;
  const Scatter& scatter = scatters_[next_scatter_];
  if (scatter.access > position()) return std::nullopt;
  return scatter.chunk;
}

void PlanReplay::note_activations(int64_t num_bytes) {
  if (!is_running() || position() < 0) return;
  int64_t& activation_memory = activation_levels_[static_cast<size_t>(position())];
  activation_memory = std::max(activation_memory, num_bytes);
}

int64_t PlanReplay::planned_activation_memory() const {
  if (position() < 0) return 0;
  return timeline().accesses[static_cast<size_t>(position())].activation_peak_bytes;
}

}  // namespace patrickstar
