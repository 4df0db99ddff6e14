// Comparison of timelines, and of the plans that were made for them. Pure functions.
//
// A path is the sequence of accesses that a step makes, with its forwards and backwards. Two steps take the same path
// if both acquire the same arrays in the same order, whatever memory or gradients they need on the way.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "common/timeline.h"
#include "plan/planner.h"

namespace patrickstar {

bool same_access(const Access& a, const Access& b);
bool same_path(const Timeline& a, const Timeline& b);
// Same path and same uses, except for gradients that leave the device. Times of accesses hold for both.
bool same_needed_uses(const Timeline& a, const Timeline& b);
// Same path and same uses: a plan holds for both if activation memory allows.
bool same_uses(const Timeline& a, const Timeline& b);
// True if `now`, of the same path, needs more activation memory than `before` at any access.
bool activation_memory_rose(const Timeline& before, const Timeline& now);

// The first position at which two paths differ: in an access, or in the end of a phase.
struct Branch {
  size_t phase = 0;    // forwards and backwards before it
  int64_t access = 0;  // accesses before it
};
inline bool operator<(const Branch& a, const Branch& b) {
  return a.phase != b.phase ? a.phase < b.phase : a.access < b.access;
}
inline bool operator==(const Branch& a, const Branch& b) { return a.phase == b.phase && a.access == b.access; }
// Nothing if the paths are equal, or the phases of one are unknown.
std::optional<Branch> branch_of(const Timeline& a, const Timeline& b);

// Compute values that the plan expects on the device at the beginning of access `begin`: those read before the plan
// fetches them. In order of need.
std::vector<ArrayId> expected_values(const Plan& plan, const Timeline& timeline, int64_t begin);
// By array index: true for compute values that the plan has brought to the device before access `end`, or expected
// there, and has not evicted.
std::vector<bool> planned_values(const Plan& plan, const Timeline& timeline, int64_t end, int num_arrays);

}  // namespace patrickstar
