#include "plan/timeline_merge.h"

#include <algorithm>
#include <cstddef>
#include <set>
#include <vector>

#include "collective/message.h"
#include "plan/timeline_paths.h"

namespace patrickstar {

namespace {

// Longer phases are not compared, but follow each other. 64 MiB of int32_t.
constexpr size_t kMostComparisons = size_t{1} << 24;

using Accesses = std::vector<Access>;
using Position = Accesses::const_iterator;

Access both(const Access& x, const Access& y) {
  Access access = x;
  for (const ArrayUse& use : y.uses) {
    const bool is_known = std::any_of(access.uses.begin(), access.uses.end(), [&use](const ArrayUse& other) {
      return other.array == use.array && other.mode == use.mode;
    });
    if (!is_known) access.uses.push_back(use);
  }
  access.activation_peak_bytes = std::max(x.activation_peak_bytes, y.activation_peak_bytes);
  return access;
}

// lengths[i * (num_b + 1) + j]: of the longest common subsequence of a[i:] and b[j:].
std::vector<int32_t> common_lengths(Position a, size_t num_a, Position b, size_t num_b) {
  std::vector<int32_t> lengths((num_a + 1) * (num_b + 1), 0);
  for (size_t i = num_a; i-- > 0;) {
    for (size_t j = num_b; j-- > 0;) {
      int32_t& length = lengths[i * (num_b + 1) + j];
      const int32_t without = std::max(lengths[(i + 1) * (num_b + 1) + j], lengths[i * (num_b + 1) + j + 1]);
      length = same_access(a[static_cast<std::ptrdiff_t>(i)], b[static_cast<std::ptrdiff_t>(j)])
                   ? lengths[(i + 1) * (num_b + 1) + j + 1] + 1
                   : without;
    }
  }
  return lengths;
}

void merge_phase(Position a, Position end_of_a, Position b, Position end_of_b, Accesses& result) {
  for (; a != end_of_a && b != end_of_b && same_access(*a, *b); ++a, ++b) result.push_back(both(*a, *b));
  Accesses rest;  // reversed
  for (; a != end_of_a && b != end_of_b && same_access(*(end_of_a - 1), *(end_of_b - 1)); --end_of_a, --end_of_b)
    rest.push_back(both(*(end_of_a - 1), *(end_of_b - 1)));
  const auto num_a = static_cast<size_t>(end_of_a - a);
  const auto num_b = static_cast<size_t>(end_of_b - b);
  const Position a_begin = a;
  const Position b_begin = b;
  if (num_a * num_b > 0 && num_a * num_b <= kMostComparisons) {
    const std::vector<int32_t> lengths = common_lengths(a, num_a, b, num_b);
    const auto length = [&](Position i, Position j) {
      return lengths[static_cast<size_t>(i - a_begin) * (num_b + 1) + static_cast<size_t>(j - b_begin)];
    };
    while (a != end_of_a && b != end_of_b) {
      if (same_access(*a, *b)) {
        result.push_back(both(*a++, *b++));
      } else {
        result.push_back(length(a + 1, b) >= length(a, b + 1) ? *a++ : *b++);
      }
    }
  }
  result.insert(result.end(), a, end_of_a);
  result.insert(result.end(), b, end_of_b);
  result.insert(result.end(), rest.rbegin(), rest.rend());
}

// Leaves the last kFinalise of each array in accesses [begin, end).
void keep_last_finalise(Accesses& accesses, size_t begin, size_t end) {
  std::set<ArrayId> seen;
  for (size_t t = end; t-- > begin;) {
    auto& uses = accesses[t].uses;
    const auto is_earlier = [&seen](const ArrayUse& use) {
      return use.mode == ArrayUseMode::kFinalise && !seen.insert(use.array).second;
    };
    uses.erase(std::remove_if(uses.begin(), uses.end(), is_earlier), uses.end());
  }
}

}  // namespace

Timeline merged(const Timeline& a, const Timeline& b) {
  if (a.phase_ends.size() != b.phase_ends.size()) return a;
  Timeline result;
  int64_t begin_of_a = 0;
  int64_t begin_of_b = 0;
  for (size_t phase = 0; phase < a.phase_ends.size(); ++phase) {
    const size_t begin = result.accesses.size();
    merge_phase(a.accesses.begin() + begin_of_a, a.accesses.begin() + a.phase_ends[phase],
                b.accesses.begin() + begin_of_b, b.accesses.begin() + b.phase_ends[phase], result.accesses);
    keep_last_finalise(result.accesses, begin, result.accesses.size());
    result.phase_ends.push_back(static_cast<int64_t>(result.accesses.size()));
    begin_of_a = a.phase_ends[phase];
    begin_of_b = b.phase_ends[phase];
  }
  return result;
}

std::string packed(const Timeline& timeline) {
  std::vector<Phase> phases;
  std::vector<int64_t> peaks;
  std::vector<int64_t> num_acquired;
  std::vector<int32_t> acquired;
  std::vector<int64_t> num_uses;
  std::vector<int32_t> used;
  std::vector<ArrayUseMode> modes;
  for (const Access& access : timeline.accesses) {
    phases.push_back(access.phase);
    peaks.push_back(access.activation_peak_bytes);
    num_acquired.push_back(static_cast<int64_t>(access.acquired.size()));
    for (ArrayId id : access.acquired) acquired.push_back(id.index());
    num_uses.push_back(static_cast<int64_t>(access.uses.size()));
    for (const ArrayUse& use : access.uses) {
      used.push_back(use.array.index());
      modes.push_back(use.mode);
    }
  }
  return MessageWriter()
      .add(phases)
      .add(peaks)
      .add(num_acquired)
      .add(acquired)
      .add(num_uses)
      .add(used)
      .add(modes)
      .add(timeline.phase_ends)
      .str();
}

Timeline unpacked_timeline(const std::string& message, int num_chunks) {
  MessageReader reader(message, "which accesses the step made");
  const auto phases = reader.next_list<Phase>();
  const size_t count = phases.size();
  const auto peaks = reader.next_list<int64_t>(count);
  const auto num_acquired = reader.next_list<int64_t>(count);
  const auto acquired = reader.next_list<int32_t>();
  const auto num_uses = reader.next_list<int64_t>(count);
  const auto used = reader.next_list<int32_t>();
  const auto modes = reader.next_list<ArrayUseMode>(used.size());
  Timeline timeline;
  timeline.phase_ends = reader.next_list<int64_t>();
  reader.finish();
  const auto check_array = [&](int32_t index) {
    reader.check(index >= 0 && index < num_chunks * kNumArrayKinds, "an array that is not there");
  };
  size_t next_acquired = 0;
  size_t next_use = 0;
  for (size_t t = 0; t < count; ++t) {
    reader.check(num_acquired[t] >= 0 && static_cast<size_t>(num_acquired[t]) <= acquired.size() - next_acquired,
                 "an access of missing arrays");
    reader.check(num_uses[t] >= 0 && static_cast<size_t>(num_uses[t]) <= used.size() - next_use,
                 "an access with missing uses");
    reader.check(phases[t] <= Phase::kBackward && peaks[t] >= 0, "no access");
    Access access;
    access.phase = phases[t];
    access.activation_peak_bytes = peaks[t];
    for (int64_t i = 0; i < num_acquired[t]; ++i) {
      check_array(acquired[next_acquired]);
      access.acquired.push_back(ArrayId::from_index(acquired[next_acquired++]));
    }
    for (int64_t i = 0; i < num_uses[t]; ++i) {
      check_array(used[next_use]);
      reader.check(modes[next_use] <= ArrayUseMode::kFinalise, "no use");
      access.uses.push_back({ArrayId::from_index(used[next_use]), modes[next_use]});
      ++next_use;
    }
    timeline.accesses.push_back(std::move(access));
  }
  reader.check(next_acquired == acquired.size() && next_use == used.size(), "arrays of no access");
  int64_t before = 0;
  for (int64_t end : timeline.phase_ends) {
    reader.check(end >= before && end <= static_cast<int64_t>(count), "no end of a phase");
    before = end;
  }
  return timeline;
}

}  // namespace patrickstar
