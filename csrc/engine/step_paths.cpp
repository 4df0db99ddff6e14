#include "engine/step_paths.h"

#include <algorithm>
#include <iterator>

namespace patrickstar {

StepPath* StepPaths::find(const Timeline& timeline) {
  const auto found = at(timeline);
  return found == paths_.end() ? nullptr : &*found;
}

StepPath* StepPaths::find(int64_t id) {
  const auto found = std::find_if(paths_.begin(), paths_.end(), [id](const StepPath& path) { return path.id == id; });
  return found == paths_.end() ? nullptr : &*found;
}

std::list<StepPath>::iterator StepPaths::at(const Timeline& timeline) {
  return std::find_if(paths_.begin(), paths_.end(),
                      [&](const StepPath& path) { return same_path(path.timeline, timeline); });
}

StepPath& StepPaths::keep(const Timeline& timeline) {
  const auto found = at(timeline);
  if (found != paths_.end()) {
    paths_.splice(paths_.begin(), paths_, found);
  } else {
    paths_.emplace_front();
    paths_.front().id = ++last_id_;
    paths_.front().timeline = timeline;
    if (paths_.size() > kMost) paths_.pop_back();
  }
  current_ = nullptr;
  candidates_.clear();
  return paths_.front();
}

void StepPaths::clear() {
  paths_.clear();
  current_ = nullptr;
  candidates_.clear();
}

void StepPaths::begin_step() {
  current_ = first();
  find_candidates({});
}

void StepPaths::find_candidates(Branch begin) {
  candidates_.clear();
  if (current_ == nullptr) return;
  for (const StepPath& path : paths_) {
    const std::optional<Branch> branch = branch_of(current_->timeline, path.timeline);
    if (branch && !(*branch < begin)) candidates_.push_back({&path, *branch});
  }
}

std::optional<int64_t> StepPaths::next_branch(size_t phase) const {
  std::optional<int64_t> next;
  for (const Candidate& candidate : candidates_) {
    if (candidate.branch.phase == phase) next = std::min(next.value_or(INT64_MAX), candidate.branch.access);
  }
  return next;
}

int StepPaths::index_of(const StepPath* path) const {
  const auto found = std::find_if(paths_.begin(), paths_.end(), [path](const StepPath& kept) { return &kept == path; });
  return static_cast<int>(std::distance(paths_.begin(), found));
}

template <class Fits>
int StepPaths::choose(Branch at, const Fits& fits) const {
  if (fits(current_->timeline)) return index_of(current_);
  for (const Candidate& candidate : candidates_) {
    if (candidate.branch == at && fits(candidate.path->timeline)) return index_of(candidate.path);
  }
  return kNone;
}

int StepPaths::choice_of_access(size_t phase, Phase kind, const std::vector<ArrayId>& acquired) const {
  const int64_t access = next_branch(phase).value();
  return choose({phase, access}, [&](const Timeline& timeline) {
    if (phase >= timeline.phase_ends.size() || timeline.phase_ends[phase] <= access) return false;
    const Access& planned = timeline.accesses[static_cast<size_t>(access)];
    return planned.phase == kind && planned.acquired == acquired;
  });
}

int StepPaths::choice_of_end(size_t phase) const {
  const int64_t access = next_branch(phase).value();
  return choose({phase, access}, [&](const Timeline& timeline) {
    return phase < timeline.phase_ends.size() && timeline.phase_ends[phase] == access;
  });
}

int StepPaths::choice_of_phase(Branch at, Phase kind) const {
  return choose(at, [&](const Timeline& timeline) {
    if (at.phase >= timeline.phase_ends.size()) return false;
    return timeline.phase_ends[at.phase] == at.access ||
           timeline.accesses[static_cast<size_t>(at.access)].phase == kind;
  });
}

bool StepPaths::take(Branch at, const std::vector<int>& choices) {
  const StepPath* longest = nullptr;
  for (int choice : choices) {
    if (choice == kNone) continue;
    const StepPath& path = *std::next(paths_.begin(), choice);
    if (longest == nullptr || path.timeline.accesses.size() > longest->timeline.accesses.size()) longest = &path;
  }
  const bool switches = longest != nullptr && longest != current_;
  if (switches) current_ = longest;
  find_candidates({at.phase, at.access + 1});
  return switches;
}

}  // namespace patrickstar
