#include "plan/planner.h"

#include <algorithm>
#include <utility>

#include "common/fingerprint.h"

namespace patrickstar {

namespace {

// One sweep over the timeline.
class Sweep {
 public:
  Sweep(const PlanProblem& problem, const UseIndex& index, const std::vector<int>& resident_at_start);

  Plan take_plan() { return std::move(plan_); }
  // Arrays on the device after the last access that are valid in the next step.
  std::vector<int> survivors() const;

 private:
  void run_access(size_t t);
  void hoist_fetches();
  bool needs_write(size_t t, ArrayId id) const;
  void plan_prefetch(size_t t);
  // Chooses arrays that are not kept, farthest next use first, until `more_bytes` fit at access t. False if all of them
  // are not enough.
  bool choose_victims(size_t t, int64_t more_bytes, std::vector<int>& chosen);
  void evict(const std::vector<int>& arrays, std::vector<ArrayId>& evicted);

  // The arrays that access t needs are not chosen from now on; all others may be.
  void keep_only(size_t t);
  // Nor are these.
  void keep_also(size_t t);
  int64_t room(size_t t) const;  // without room set aside for prefetches
  int64_t activation_memory(size_t t) const {
    return std::max(accesses_[t].activation_peak_bytes, problem_.least_activation_bytes);
  }
  // Access numbers of successive calls must not fall.
  int64_t next_use(int array, size_t t);
  const ArrayCost& cost(int array) const { return problem_.arrays[static_cast<size_t>(array)]; }
  bool is_resident(int array) const { return place_[static_cast<size_t>(array)] >= 0; }
  int64_t missing_bytes(const std::vector<int>& arrays) const;
  void add(int array);
  void remove(int array);

  const PlanProblem& problem_;
  const std::vector<Access>& accesses_;
  const UseIndex& index_;
  std::vector<int> resident_;
  std::vector<int> place_;         // by array: its index in resident_, or -1
  std::vector<size_t> uses_over_;  // by array: uses up to the last call of next_use()
  std::vector<int> kept_;          // by array: the round that kept it last
  int round_ = 0;
  int64_t resident_bytes_ = 0;
  std::vector<int64_t> occupied_;  // by access: resident bytes at its height
  Plan plan_;
};

Sweep::Sweep(const PlanProblem& problem, const UseIndex& index, const std::vector<int>& resident_at_start)
    : problem_(problem),
      accesses_(problem.timeline->accesses),
      index_(index),
      place_(problem.arrays.size(), -1),
      uses_over_(problem.arrays.size(), 0),
      kept_(problem.arrays.size(), 0) {
  for (int array : resident_at_start) add(array);
  plan_.accesses.resize(accesses_.size());
  for (size_t t = 0; t < accesses_.size(); ++t) run_access(t);
  if (problem_.prefetch_bytes > 0) hoist_fetches();
}

void Sweep::run_access(size_t t) {
  const std::vector<int>& needed = index_.needed[t];
  AccessPlan& plan = plan_.accesses[t];
  int64_t in_use_bytes = 0;
  for (int array : needed) in_use_bytes += cost(array).num_bytes;
  plan_.least_limit_bytes =
      std::max(plan_.least_limit_bytes, problem_.fixed_bytes + in_use_bytes + activation_memory(t));

  // If an access does not fit even alone, everything else is evicted and the runtime reports the shortage.
  std::vector<int> chosen;
  keep_only(t);
  choose_victims(t, missing_bytes(needed), chosen);
  evict(chosen, plan.evict);
  for (const ArrayUse& use : accesses_[t].uses) {
    const int array = use.array.index();
    if (use.mode == ArrayUseMode::kFinalise || is_resident(array)) continue;
    const bool created =
        use.mode == ArrayUseMode::kWrite && index_.uses[static_cast<size_t>(array)].front() == static_cast<int64_t>(t);
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
    remove(array);
  }
  if (problem_.prefetch_bytes == 0 && t + 1 < accesses_.size()) plan_prefetch(t);
}

bool Sweep::needs_write(size_t t, ArrayId id) const {
  const auto& uses = accesses_[t].uses;
  return std::any_of(uses.begin(), uses.end(),
                     [id](const ArrayUse& use) { return use.array == id && use.mode == ArrayUseMode::kWrite; });
}

// Moves each fetch to the earliest access from which its array fits until it is needed, earliest need first. Arrays
// that are written (a gradient evicted half-accumulated) may not exist earlier and stay.
void Sweep::hoist_fetches() {
  std::vector<int64_t> left(accesses_.size());  // by access: bytes that fetches for later ones may still take
  for (size_t t = 0; t < accesses_.size(); ++t) {
    left[t] = std::min(problem_.prefetch_bytes, room_bytes(problem_, t) - occupied_[t]);
  }
  std::vector<size_t> earliest(problem_.arrays.size(), 0);  // by array: it was needed or evicted at the access before
  for (size_t t = 0; t < accesses_.size(); ++t) {
    AccessPlan& plan = plan_.accesses[t];
    for (ArrayId id : plan.evict) earliest[static_cast<size_t>(id.index())] = t + 1;
    std::vector<ArrayId> stay;
    for (ArrayId id : plan.fetch) {
      const int64_t bytes = cost(id.index()).num_bytes;
      size_t start = t;
      while (start > earliest[static_cast<size_t>(id.index())] && left[start - 1] >= bytes) --start;
      if (start == t || needs_write(t, id)) {
        stay.push_back(id);
        continue;
      }
      plan_.accesses[start].prefetch.push_back(id);
      for (size_t s = start; s < t; ++s) left[s] -= bytes;
    }
    plan.fetch = std::move(stay);
    for (int array : index_.needed[t]) earliest[static_cast<size_t>(array)] = t + 1;
  }
}

void Sweep::plan_prefetch(size_t t) {
  std::vector<int> wanted;
  for (const ArrayUse& use : accesses_[t + 1].uses) {
    const int array = use.array.index();
    if (use.mode == ArrayUseMode::kRead && !is_resident(array)) wanted.push_back(array);
  }
  if (wanted.empty()) return;
  std::sort(wanted.begin(), wanted.end());
  wanted.erase(std::unique(wanted.begin(), wanted.end()), wanted.end());
  // Access t must have room for its own arrays and the prefetched ones. Victims must be arrays that access t + 1 would
  // evict anyway, so a prefetch costs no bytes.
  std::vector<int> chosen;
  std::vector<int> chosen_later;
  keep_only(t);
  keep_also(t + 1);
  if (!choose_victims(t, missing_bytes(wanted), chosen)) return;
  keep_only(t + 1);
  choose_victims(t + 1, missing_bytes(index_.needed[t + 1]), chosen_later);
  std::sort(chosen_later.begin(), chosen_later.end());
  if (!std::all_of(chosen.begin(), chosen.end(),
                   [&](int array) { return std::binary_search(chosen_later.begin(), chosen_later.end(), array); }))
    return;
  AccessPlan& plan = plan_.accesses[t];
  evict(chosen, plan.evict_ahead);
  for (int array : wanted) {
    plan.prefetch.push_back(ArrayId::from_index(array));
    plan_.uploaded_bytes += cost(array).fetch_bytes;
    add(array);
  }
}

void Sweep::keep_only(size_t t) {
  ++round_;
  keep_also(t);
}

void Sweep::keep_also(size_t t) {
  for (int array : index_.needed[t]) kept_[static_cast<size_t>(array)] = round_;
}

bool Sweep::choose_victims(size_t t, int64_t more_bytes, std::vector<int>& chosen) {
  int64_t excess = resident_bytes_ + more_bytes - room(t);
  if (excess <= 0) return true;
  std::vector<std::pair<int64_t, int>> candidates;  // next use, array
  candidates.reserve(resident_.size());
  for (int array : resident_) {
    if (kept_[static_cast<size_t>(array)] != round_ && cost(array).num_bytes > 0) {
      candidates.emplace_back(next_use(array, t), array);
    }
  }
  // Farthest first; among equals, free evictions first.
  const auto is_behind = [this](const auto& a, const auto& b) {
    if (a.first != b.first) return a.first < b.first;
    const int64_t cost_a = cost(a.second).evict_bytes;
    const int64_t cost_b = cost(b.second).evict_bytes;
    return cost_a != cost_b ? cost_a > cost_b : a.second > b.second;
  };
  std::make_heap(candidates.begin(), candidates.end(), is_behind);
  while (excess > 0 && !candidates.empty()) {
    std::pop_heap(candidates.begin(), candidates.end(), is_behind);
    chosen.push_back(candidates.back().second);
    excess -= cost(candidates.back().second).num_bytes;
    candidates.pop_back();
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

int64_t Sweep::next_use(int array, size_t t) {
  const auto& uses = index_.uses[static_cast<size_t>(array)];
  size_t& over = uses_over_[static_cast<size_t>(array)];
  while (over < uses.size() && uses[over] <= static_cast<int64_t>(t)) ++over;
  if (over < uses.size()) return uses[over];
  if (cost(array).evict_bytes > 0) return static_cast<int64_t>(accesses_.size());  // the optimizer reads it
  if (!cost(array).survives_step || uses.empty()) return INT64_MAX;
  return static_cast<int64_t>(accesses_.size()) + uses.front();
}

int64_t Sweep::missing_bytes(const std::vector<int>& arrays) const {
  int64_t bytes = 0;
  for (int array : arrays) {
    if (!is_resident(array)) bytes += cost(array).num_bytes;
  }
  return bytes;
}

void Sweep::add(int array) {
  if (is_resident(array)) return;
  place_[static_cast<size_t>(array)] = static_cast<int>(resident_.size());
  resident_.push_back(array);
  resident_bytes_ += cost(array).num_bytes;
}

void Sweep::remove(int array) {
  if (!is_resident(array)) return;
  const int place = std::exchange(place_[static_cast<size_t>(array)], -1);
  const int last = resident_.back();
  resident_.pop_back();
  if (last != array) {
    resident_[static_cast<size_t>(place)] = last;
    place_[static_cast<size_t>(last)] = place;
  }
  resident_bytes_ -= cost(array).num_bytes;
}

std::vector<int> Sweep::survivors() const {
  std::vector<int> result;
  for (int array : resident_) {
    if (cost(array).survives_step) result.push_back(array);
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

UseIndex index_uses(const PlanProblem& problem) {
  const std::vector<Access>& accesses = problem.timeline->accesses;
  UseIndex index;
  index.uses.resize(problem.arrays.size());
  index.needed.resize(accesses.size());
  for (size_t t = 0; t < accesses.size(); ++t) {
    std::vector<int>& needed = index.needed[t];
    for (const ArrayUse& use : accesses[t].uses) {
      if (use.mode != ArrayUseMode::kFinalise) needed.push_back(use.array.index());
    }
    std::sort(needed.begin(), needed.end());
    needed.erase(std::unique(needed.begin(), needed.end()), needed.end());
    for (int array : needed) index.uses[static_cast<size_t>(array)].push_back(static_cast<int64_t>(t));
  }
  return index;
}

Plan make_plan(const PlanProblem& problem) { return make_plan(problem, index_uses(problem)); }

Plan make_plan(const PlanProblem& problem, const UseIndex& index) {
  // A step starts with what the previous step left. The second sweep reaches that steady state.
  Sweep first(problem, index, {});
  Sweep second(problem, index, first.survivors());
  return second.take_plan();
}

}  // namespace patrickstar
