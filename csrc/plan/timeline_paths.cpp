#include "plan/timeline_paths.h"

#include <algorithm>

namespace patrickstar {

namespace {

bool same_use(const ArrayUse& a, const ArrayUse& b) { return a.array == b.array && a.mode == b.mode; }

bool uses_equal(const Access& x, const Access& y) {
  return std::equal(x.uses.begin(), x.uses.end(), y.uses.begin(), y.uses.end(), same_use);
}

bool needed_uses_equal(const Access& x, const Access& y) {
  const auto next_use = [](auto from, auto end) {
    return std::find_if(from, end, [](const ArrayUse& use) { return use.mode != ArrayUseMode::kFinalise; });
  };
  auto of_x = next_use(x.uses.begin(), x.uses.end());
  auto of_y = next_use(y.uses.begin(), y.uses.end());
  while (of_x != x.uses.end() && of_y != y.uses.end()) {
    if (!same_use(*of_x, *of_y)) return false;
    of_x = next_use(of_x + 1, x.uses.end());
    of_y = next_use(of_y + 1, y.uses.end());
  }
  return of_x == x.uses.end() && of_y == y.uses.end();
}

template <class Same>
bool same_accesses(const Timeline& a, const Timeline& b, const Same& same) {
  return std::equal(a.accesses.begin(), a.accesses.end(), b.accesses.begin(), b.accesses.end(), same);
}

bool is_value_read(const ArrayUse& use) {
  return use.array.kind == ArrayKind::kParam && use.mode != ArrayUseMode::kFinalise;
}

}  // namespace

bool same_access(const Access& a, const Access& b) { return a.phase == b.phase && a.acquired == b.acquired; }

bool same_path(const Timeline& a, const Timeline& b) {
  const bool phases_known = !a.phase_ends.empty() && !b.phase_ends.empty();
  return (!phases_known || a.phase_ends == b.phase_ends) && same_accesses(a, b, same_access);
}

bool same_needed_uses(const Timeline& a, const Timeline& b) {
  return same_path(a, b) && same_accesses(a, b, needed_uses_equal);
}

bool same_uses(const Timeline& a, const Timeline& b) { return same_path(a, b) && same_accesses(a, b, uses_equal); }

bool activation_memory_rose(const Timeline& before, const Timeline& now) {
  for (size_t t = 0; t < now.accesses.size(); ++t) {
    if (now.accesses[t].activation_peak_bytes > before.accesses[t].activation_peak_bytes) return true;
  }
  return false;
}

std::optional<Branch> branch_of(const Timeline& a, const Timeline& b) {
  if (a.phase_ends.empty() || b.phase_ends.empty()) return std::nullopt;
  Branch at;
  for (; at.phase < a.phase_ends.size() && at.phase < b.phase_ends.size(); ++at.phase) {
    const int64_t end_of_a = a.phase_ends[at.phase];
    const int64_t end_of_b = b.phase_ends[at.phase];
    for (; at.access < std::min(end_of_a, end_of_b); ++at.access) {
      const auto t = static_cast<size_t>(at.access);
      if (!same_access(a.accesses[t], b.accesses[t])) return at;
    }
    if (end_of_a != end_of_b) return at;
  }
  if (a.phase_ends.size() == b.phase_ends.size()) return std::nullopt;
  return at;
}

std::vector<ArrayId> expected_values(const Plan& plan, const Timeline& timeline, int64_t begin) {
  std::vector<ArrayId> expected;
  std::vector<bool> known;  // by array index: expected, or fetched by then
  const auto note = [&known](ArrayId id) {
    const auto index = static_cast<size_t>(id.index());
    if (index >= known.size()) known.resize(index + 1);
    const bool was_known = known[index];
    known[index] = true;
    return !was_known;
  };
  for (auto t = static_cast<size_t>(begin); t < timeline.accesses.size(); ++t) {
    for (ArrayId id : plan.accesses[t].fetch) note(id);
    for (const ArrayUse& use : timeline.accesses[t].uses) {
      if (is_value_read(use) && note(use.array)) expected.push_back(use.array);
    }
    for (ArrayId id : plan.accesses[t].prefetch) note(id);
  }
  return expected;
}

std::vector<bool> planned_values(const Plan& plan, const Timeline& timeline, int64_t end, int num_arrays) {
  std::vector<bool> there(static_cast<size_t>(num_arrays));
  const auto set = [&there](const std::vector<ArrayId>& arrays, bool value) {
    for (ArrayId id : arrays) {
      if (id.kind == ArrayKind::kParam) there[static_cast<size_t>(id.index())] = value;
    }
  };
  set(expected_values(plan, timeline, 0), true);
  for (size_t t = 0; t < static_cast<size_t>(end); ++t) {
    const AccessPlan& access = plan.accesses[t];
    set(access.evict, false);
    set(access.fetch, true);
    set(access.evict_ahead, false);
    set(access.prefetch, true);
  }
  return there;
}

}  // namespace patrickstar
