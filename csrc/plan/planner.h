// The planner: a pure function from an observed timeline and a memory limit to a plan for the next step.
//
// At every moment the limit minus the tide is what payloads may take. The planner sweeps the moments and evicts,
// whenever room is short, the array whose next use is farthest (Belady 1966). For arrays of one size this
// moves the fewest bytes that any policy can, also when the room varies from moment to moment (an interval may be
// kept or not; the greedy choice by end time keeps the most).
//
// Prefetches: without room set aside for them, they look one moment ahead and are planned only where the room of the
// earlier moment allows them with the same evictions, so they cost no bytes. With `prefetch_bytes` set aside, which
// keeps as much from staying on the device, fetches start as early as that room allows, in the order of need.
//
//   Plan plan = make_plan(problem);
//   plan.moments[t].evict   // at the start of moment t, before its fetches
//
// Nothing here is shared; any thread may call it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "common/timeline.h"
#include "common/types.h"

namespace patrickstar {

// What the planner must know of an array beside the timeline. Costs are bytes over the link.
struct ArrayCost {
  int64_t num_bytes = 0;     // of device memory while resident
  int64_t fetch_bytes = 0;   // to bring it back; 0 when it can be derived on the device
  int64_t evict_bytes = 0;   // to push it out before its time; 0 when clean. A dirty array is of use until it retires.
  int64_t retire_bytes = 0;  // when the timeline says that it leaves
  bool survives_step = false;  // a copy on the device is still valid in the next step
};

// What an update moves that is made on the device though its chunk is at home on the host ([Note: visits],
// engine/visits.h): its states, and its compute value where that is a part of them.
struct VisitCost {
  int64_t up_bytes = 0;
  int64_t down_bytes = 0;   // with the new compute value
  int64_t value_bytes = 0;  // of those up, what need not go where the device has the value
};

struct PlanProblem {
  const Timeline* timeline = nullptr;
  std::vector<ArrayCost> arrays;    // by ArrayId::index()
  int64_t limit_bytes = INT64_MAX;  // for tide, fixed and planned payloads together
  int64_t least_tide_bytes = 0;     // the tide counts as at least this at every moment
  int64_t fixed_bytes = 0;          // payloads that stay on the device throughout
  int64_t prefetch_bytes = 0;       // of the room, for fetches ahead of their use
  // By moment, or empty: of the room, what slots take that wait for another moment ([Note: rare sizes],
  // memory/slot_pool.h).
  std::vector<int64_t> idle_bytes;
  // What the host has for gradients that have memory there only until their update.
  int64_t gradient_room_bytes = INT64_MAX;
  std::vector<VisitCost> visits;  // by chunk; empty: none can
};

struct MomentPlan {
  std::vector<ArrayId> evict;        // before the fetches of this moment
  std::vector<ArrayId> fetch;        // needed now, not on the device
  std::vector<ArrayId> evict_ahead;  // after the fetches, to make room for the prefetches
  std::vector<ArrayId> prefetch;     // needed at a later moment, in the order of need
};

struct Plan {
  std::vector<MomentPlan> moments;
  int64_t uploaded_bytes = 0;     // per step, in the steady state
  int64_t downloaded_bytes = 0;   // per step, in the steady state
  int64_t least_limit_bytes = 0;  // the smallest limit_bytes under which every moment fits
};

Plan make_plan(const PlanProblem& problem);

// Tells one plan from another.
uint64_t fingerprint(const Plan& plan);

// What planned payloads may take at a moment, prefetches included; INT64_MAX when nothing limits them.
int64_t room_bytes(const PlanProblem& problem, size_t moment);

}  // namespace patrickstar
