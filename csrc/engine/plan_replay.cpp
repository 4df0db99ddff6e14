#include "engine/plan_replay.h"

#include <algorithm>
#include <utility>

namespace patrickstar {

void PlanReplay::set_plan(Plan plan, NextUse next_use) {
  plan_ = std::move(plan);
  next_use_ = std::move(next_use);
  if (!has_plan()) course_ = Course::kNone;
}

void PlanReplay::restart(const Timeline& timeline) {
  course_ = has_plan() ? Course::kExact : Course::kNone;
  timeline_ = &timeline;
  next_ = phase_begin_ = 0;
  phase_end_ = static_cast<int64_t>(timeline.accesses.size());
  num_phases_ = next_scatter_ = 0;
  scatters_.clear();
  activation_levels_.assign(has_plan() ? timeline.accesses.size() : 0, 0);
}

void PlanReplay::end_step() {
  if (is_running()) course_ = Course::kReady;
}

bool PlanReplay::begin_phase(Phase phase, const Layout& layout) {
  const std::vector<Access>& accesses = timeline_->accesses;
  if (num_phases_ == 0) {
    for (size_t t = 0; t < accesses.size(); ++t) {
      for (const ArrayUse& use : accesses[t].uses) {
        const bool is_scatter = use.mode == ArrayUseMode::kFinalise && use.array.kind == ArrayKind::kGrad;
        if (is_scatter && layout.chunk(use.array.chunk).is_sharded())
          scatters_.push_back({static_cast<int64_t>(t), use.array.chunk});
      }
    }
  }
  phase_begin_ = next_;
  if (!timeline_->phase_ends.empty()) {
    if (num_phases_ >= timeline_->phase_ends.size()) return false;
    phase_end_ = std::max(next_, timeline_->phase_ends[num_phases_]);
  } else {
    const auto first = accesses.begin() + next_;
    const auto end =
        std::find_if(first, accesses.end(), [phase](const Access& access) { return access.phase != phase; });
    if (first == end) return false;
    phase_end_ = end - accesses.begin();
  }
  ++num_phases_;
  return next_ == phase_end_ || next_access().phase == phase;
}

bool PlanReplay::matches(int64_t access, Phase phase, const std::vector<ArrayId>& acquired) const {
  const Access& planned = timeline_->accesses[static_cast<size_t>(access)];
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
  return timeline_->accesses[static_cast<size_t>(position())].activation_peak_bytes;
}

}  // namespace patrickstar
