#include "plan/planner.h"

#include <algorithm>
#include <set>
#include <utility>

#include "common/fingerprint.h"

namespace patrickstar {

namespace {

// One sweep over the timeline.
class Sweep {
 public:
  Sweep(const PlanProblem& problem, const std::set<int>& resident_at_start);

  Plan take_plan() { return std::move(plan_); }
  // Arrays on the device after the last access that are valid in the next step.
  std::set<int> survivors() const;

 private:
  void run_access(size_t t);
  void hoist_fetches();
  bool needs_write(size_t t, ArrayId id) const;
  void plan_prefetch(size_t t, const std::set<int>& in_use);
  // Chooses arrays outside `keep`, farthest next use first, until `more_bytes` fit at access t. False if all of them
  // are not enough.
  bool choose_victims(size_t t, int64_t more_bytes, const std::set<int>& keep, std::vector<int>& chosen) const;
  void evict(const std::vector<int>& arrays, std::vector<ArrayId>& evicted);
  std::vector<std::pair<int64_t, int>> victims(size_t t, const std::set<int>& keep) const;

  int64_t room(size_t t) const;  // without room set aside for prefetches
  int64_t activation_memory(size_t t) const {
    return std::max(accesses_[t].activation_peak_bytes, problem_.least_activation_bytes);
  }
  int64_t next_use(int array, size_t t) const;
  const ArrayCost& cost(int array) const { return problem_.arrays[static_cast<size_t>(array)]; }
  int64_t missing_bytes(const std::set<int>& arrays) const;
  void add(int array);
  void remove(int array);

  const PlanProblem& problem_;
  const std::vector<Access>& accesses_;
  std::vector<std::vector<int64_t>> uses_;
  std::vector<std::set<int>> needed_;  // by access: arrays read or written
  std::set<int> resident_;
  int64_t resident_bytes_ = 0;
  std::vector<int64_t> occupied_;  // by access: resident bytes at its height
  Plan plan_;
};

Sweep::Sweep(const PlanProblem& problem, const std::set<int>& resident_at_start)
    : problem_(problem),
      accesses_(problem.timeline->accesses),
      uses_(problem.arrays.size()),
      needed_(accesses_.size()) {
  for (size_t t = 0; t < accesses_.size(); ++t) {
    for (const ArrayUse& use : accesses_[t].uses) {
      if (use.mode == ArrayUseMode::kFinalise) continue;
      if (needed_[t].insert(use.array.index()).second) {
        uses_[static_cast<size_t>(use.array.index())].push_back(static_cast<int64_t>(t));
      }
    }
  }
  for (int array : resident_at_start) add(array);
  plan_.accesses.resize(accesses_.size());
  for (size_t t = 0; t < accesses_.size(); ++t) run_access(t);
  if (problem_.prefetch_bytes > 0) hoist_fetches();
}

void Sweep::run_access(size_t t) {
  const std::set<int>& needed = needed_[t];
  AccessPlan& plan = plan_.accesses[t];
  int64_t in_use_bytes = 0;
  for (int array : needed) in_use_bytes += cost(array).num_bytes;
  plan_.least_limit_bytes =
      std::max(plan_.least_limit_bytes, problem_.fixed_bytes + in_use_bytes + activation_memory(t));

  // If an access does not fit even alone, everything else is evicted and the runtime reports the shortage.
  std::vector<int> chosen;
  choose_victims(t, missing_bytes(needed), needed, chosen);
  evict(chosen, plan.evict);
  for (const ArrayUse& use : accesses_[t].uses) {
    const int array = use.array.index();
    if (use.mode == ArrayUseMode::kFinalise || resident_.count(array)) continue;
    const bool created =
        use.mode == ArrayUseMode::kWrite && uses_[static_cast<size_t>(array)].front() == static_cast<int64_t>(t);
    if (!created) {
      plan.fetch.push_back(use.array);
      plan_.uploaded_bytes += cost(array).fetch_bytes;
    }
    add(array);
  }
  occupied_.push_back(resident_bytes_);
  for (const ArrayUse& use : accesses_[t].uses) {
    const int array = use.array.index();
    if (use.mode != ArrayUseMode::kFinalise) continue;
    plan_.downloaded_bytes += cost(array).finalise_bytes;
    if (resident_.count(array)) remove(array);
  }
  if (problem_.prefetch_bytes == 0 && t + 1 < accesses_.size()) plan_prefetch(t, needed);
}

bool Sweep::needs_write(size_t t, ArrayId id) const {
  const auto& uses = accesses_[t].uses;
  return std::any_of(uses.begin(), uses.end(),
                     [id](const ArrayUse& use) { return use.array == id && use.mode == ArrayUseMode::kWrite; });
}

// Moves each fetch to the earliest access from which its array fits until it is needed, earliest need first. Arrays
// that are written (a gradient evicted half-accumulated) may not exist earlier and stay.
void Sweep::hoist_fetches() {
  std::vector<int64_t> ahead(accesses_.size(), 0);  // by access: bytes fetched for later ones
  for (size_t t = 0; t < accesses_.size(); ++t) {
    std::vector<ArrayId> left;
    for (ArrayId id : plan_.accesses[t].fetch) {
      const int64_t bytes = cost(id.index()).num_bytes;
      const auto fits = [&](size_t s) {
        const auto& evicted = plan_.accesses[s].evict;
        return ahead[s] + bytes <= problem_.prefetch_bytes &&
               occupied_[s] + ahead[s] + bytes <= room_bytes(problem_, s) && !needed_[s].count(id.index()) &&
               std::find(evicted.begin(), evicted.end(), id) == evicted.end();
      };
      size_t start = t;
      while (start > 0 && fits(start - 1)) --start;
      if (start == t || needs_write(t, id)) {
        left.push_back(id);
        continue;
      }
      plan_.accesses[start].prefetch.push_back(id);
      for (size_t s = start; s < t; ++s) ahead[s] += bytes;
    }
    plan_.accesses[t].fetch = std::move(left);
  }
}

void Sweep::plan_prefetch(size_t t, const std::set<int>& in_use) {
  std::set<int> wanted;
  for (const ArrayUse& use : accesses_[t + 1].uses) {
    const int array = use.array.index();
    if (use.mode == ArrayUseMode::kRead && !resident_.count(array)) wanted.insert(array);
  }
  if (wanted.empty()) return;
  const std::set<int>& next = needed_[t + 1];
  std::set<int> keep = in_use;
  keep.insert(next.begin(), next.end());
  // Access t must have room for its own arrays and the prefetched ones. Victims must be arrays that access t + 1 would
  // evict anyway, so a prefetch costs no bytes.
  std::vector<int> chosen;
  std::vector<int> chosen_later;
  if (!choose_victims(t, missing_bytes(wanted), keep, chosen)) return;
  choose_victims(t + 1, missing_bytes(next), next, chosen_later);
  const std::set<int> later(chosen_later.begin(), chosen_later.end());
  if (!std::all_of(chosen.begin(), chosen.end(), [&](int array) { return later.count(array) > 0; })) return;
  AccessPlan& plan = plan_.accesses[t];
  evict(chosen, plan.evict_ahead);
  for (int array : wanted) {
    plan.prefetch.push_back(ArrayId::from_index(array));
    plan_.uploaded_bytes += cost(array).fetch_bytes;
    add(array);
  }
}

std::vector<std::pair<int64_t, int>> Sweep::victims(size_t t, const std::set<int>& keep) const {
  std::vector<std::pair<int64_t, int>> candidates;
  for (int array : resident_) {
    if (!keep.count(array) && cost(array).num_bytes > 0) candidates.emplace_back(next_use(array, t), array);
  }
  // Farthest first; among equals, free evictions first.
  std::sort(candidates.begin(), candidates.end(), [this](const auto& a, const auto& b) {
    if (a.first != b.first) return a.first > b.first;
    const int64_t cost_a = cost(a.second).evict_bytes;
    const int64_t cost_b = cost(b.second).evict_bytes;
    return cost_a != cost_b ? cost_a < cost_b : a.second < b.second;
  });
  return candidates;
}

bool Sweep::choose_victims(size_t t, int64_t more_bytes, const std::set<int>& keep, std::vector<int>& chosen) const {
  int64_t excess = resident_bytes_ + more_bytes - room(t);
  if (excess <= 0) return true;
  for (const auto& [use, array] : victims(t, keep)) {
    if (excess <= 0) break;
    chosen.push_back(array);
    excess -= cost(array).num_bytes;
  }
  return excess <= 0;
}

void Sweep::evict(const std::vector<int>& arrays, std::vector<ArrayId>& evicted) {
  for (int array : arrays) {
    evicted.push_back(ArrayId::from_index(array));
    plan_.downloaded_bytes += cost(array).evict_bytes;
    remove(array);
  }
}

int64_t Sweep::room(size_t t) const {
  const int64_t room = room_bytes(problem_, t);
  return room == INT64_MAX ? room : room - problem_.prefetch_bytes;
}

int64_t Sweep::next_use(int array, size_t t) const {
  const auto& uses = uses_[static_cast<size_t>(array)];
  const auto found = std::upper_bound(uses.begin(), uses.end(), static_cast<int64_t>(t));
  if (found != uses.end()) return *found;
  if (cost(array).evict_bytes > 0) return static_cast<int64_t>(accesses_.size());  // the optimizer reads it
  if (!cost(array).survives_step || uses.empty()) return INT64_MAX;
  return static_cast<int64_t>(accesses_.size()) + uses.front();
}

int64_t Sweep::missing_bytes(const std::set<int>& arrays) const {
  int64_t bytes = 0;
  for (int array : arrays) {
    if (!resident_.count(array)) bytes += cost(array).num_bytes;
  }
  return bytes;
}

void Sweep::add(int array) {
  if (resident_.insert(array).second) resident_bytes_ += cost(array).num_bytes;
}

void Sweep::remove(int array) {
  if (resident_.erase(array) > 0) resident_bytes_ -= cost(array).num_bytes;
}

std::set<int> Sweep::survivors() const {
  std::set<int> result;
  for (int array : resident_) {
    if (cost(array).survives_step) result.insert(array);
  }
  return result;
}

}  // namespace

int64_t room_bytes(const PlanProblem& problem, size_t access) {
  if (problem.limit_bytes == INT64_MAX) return INT64_MAX;
  const int64_t activation_memory =
      std::max(problem.timeline->accesses[access].activation_peak_bytes, problem.least_activation_bytes);
  const int64_t idle = problem.idle_bytes.empty() ? 0 : problem.idle_bytes[access];
  return problem.limit_bytes - problem.fixed_bytes - activation_memory - idle;
}

uint64_t fingerprint(const Plan& plan) {
  Fingerprint result;
  for (const AccessPlan& access : plan.accesses) {
    for (const auto* arrays : {&access.evict, &access.fetch, &access.evict_ahead, &access.prefetch}) {
      result.add(static_cast<int64_t>(arrays->size()));
      for (ArrayId id : *arrays) result.add(id.index());
    }
  }
  return result.value();
}

Plan make_plan(const PlanProblem& problem) {
  // A step starts with what the previous step left. The second sweep reaches that steady state.
  Sweep first(problem, {});
  Sweep second(problem, first.survivors());
  return second.take_plan();
}

}  // namespace patrickstar
