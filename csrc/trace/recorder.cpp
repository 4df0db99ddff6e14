#include "trace/recorder.h"

#include <algorithm>
#include <utility>

namespace patrickstar {

void Recorder::note_activations(int64_t activation_peak) {
  if (running_.accesses.empty()) return;
  int64_t& peak = running_.accesses.back().activation_peak_bytes;
  peak = std::max(peak, activation_peak);
}

void Recorder::note_absent(int64_t num_bytes) {
  absent_bytes_ = num_bytes;
  if (!absent_.empty()) absent_.back() = std::max(absent_.back(), num_bytes);
}

void Recorder::note_copies(const ActivationCopies& more) {
  if (copies_.empty()) return;
  ActivationCopies& copies = copies_.back();
  copies.leaving_bytes += more.leaving_bytes;
  copies.coming_bytes += more.coming_bytes;
  copies.needed_bytes += more.needed_bytes;
}

void Recorder::count_absent(int64_t most_bytes) {
  for (size_t t = 0; t < running_.accesses.size(); ++t) {
    int64_t& peak = running_.accesses[t].activation_peak_bytes;
    peak = std::max(peak, std::min(peak + absent_[t], most_bytes));
  }
}

void Recorder::undo_forward() {
  running_.accesses.resize(std::min(forward_begin_, running_.accesses.size()));
  absent_.resize(running_.accesses.size());
  copies_.resize(running_.accesses.size());
}

void Recorder::begin_access(Phase phase, std::vector<ArrayId> acquired, int64_t activation_peak) {
  note_activations(activation_peak);
  Access access;
  access.phase = phase;
  for (ArrayId array : acquired) access.uses.push_back({array, ArrayUseMode::kRead});
  access.acquired = std::move(acquired);
  running_.accesses.push_back(std::move(access));
  absent_.push_back(absent_bytes_);
  copies_.emplace_back();
}

void Recorder::add(ArrayUse use) { add_at(position(), use); }

void Recorder::add_at(int64_t position, ArrayUse use) {
  if (position < 0) return;
  auto& uses = running_.accesses[static_cast<size_t>(position)].uses;
  const bool known = std::any_of(uses.begin(), uses.end(), [&](const ArrayUse& other) {
    return other.array == use.array && other.mode == use.mode;
  });
  if (!known) uses.push_back(use);
}

void Recorder::finish_step() {
  if (running_.accesses.empty()) return abandon_step();
  last_ = std::move(running_);
  running_ = {};
  absent_.clear();
  const bool any_left = std::any_of(copies_.begin(), copies_.end(),
                                    [](const ActivationCopies& copies) { return copies.leaving_bytes > 0; });
  last_copies_ = any_left ? std::move(copies_) : std::vector<ActivationCopies>();
  copies_.clear();
}

void Recorder::set_last(Timeline timeline) {
  last_ = std::move(timeline);
  last_copies_.clear();
}

void Recorder::abandon_step() {
  running_ = {};
  absent_.clear();
  copies_.clear();
  forward_begin_ = 0;
}

NextUse::NextUse(const Timeline& timeline, int num_arrays) : uses_(static_cast<size_t>(num_arrays)) {
  for (size_t t = 0; t < timeline.accesses.size(); ++t) {
    for (const ArrayUse& use : timeline.accesses[t].uses) {
      if (use.mode == ArrayUseMode::kFinalise) continue;
      auto& uses = uses_[static_cast<size_t>(use.array.index())];
      if (uses.empty() || uses.back() != static_cast<int64_t>(t)) uses.push_back(static_cast<int64_t>(t));
    }
  }
}

int64_t NextUse::after(ArrayId array, int64_t position) const {
  if (uses_.empty()) return kNever;
  const auto& uses = uses_[static_cast<size_t>(array.index())];
  const auto found = std::upper_bound(uses.begin(), uses.end(), position);
  return found == uses.end() ? kNever : *found;
}

}  // namespace patrickstar
