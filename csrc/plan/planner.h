// The planner: a pure function from a recorded timeline and a memory limit to a plan for the next step.
//
// Chunk buffers may take the limit minus activation memory at each access. The planner sweeps the accesses and, when
// room is short, evicts the array whose next use is farthest (Belady 1966). For arrays of one size this moves the
// fewest bytes of any policy, also when the room varies between accesses.
//
// Prefetches. With prefetch_bytes == 0 they look one access ahead, and are planned only if the evictions stay the same,
// so they cost no bytes. Otherwise prefetch_bytes of the room are reserved for them, and less stays on the device.
// Fetches then start as early as that room allows, earliest need first.
//
//   Plan plan = make_plan(problem);
//   plan.accesses[t].evict   // at the start of access t, before its fetches
//
// No shared state; any thread may call it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "common/timeline.h"
#include "common/types.h"

namespace patrickstar {

// Costs of an array, in bytes over the link except num_bytes.
struct ArrayCost {
  int64_t num_bytes = 0;       // device memory while resident
  int64_t fetch_bytes = 0;     // to bring it back; 0: derived on the device
  int64_t evict_bytes = 0;     // to evict it early; 0: clean. A dirty array is needed until the timeline finalises it.
  int64_t finalise_bytes = 0;  // when the timeline finalises it
  bool survives_step = false;  // a device copy is still valid in the next step
};

// Bytes of a GPU round-trip update (engine/round_trips.h): the states, and the compute value where it is part of them.
struct RoundTripCost {
  int64_t up_bytes = 0;
  int64_t down_bytes = 0;   // includes the new compute value
  int64_t value_bytes = 0;  // part of up_bytes that is skipped when the device has the value
};

struct PlanProblem {
  const Timeline* timeline = nullptr;
  std::vector<ArrayCost> arrays;       // by ArrayId::index()
  int64_t limit_bytes = INT64_MAX;     // activation memory and chunk buffers together
  int64_t least_activation_bytes = 0;  // lower bound of activation memory at every access
  int64_t fixed_bytes = 0;             // chunk buffers that never leave the device
  int64_t prefetch_bytes = 0;          // reserved for fetches ahead of their use
  // By access, or empty: buffers that idle for another access because of their rare size (memory/device_buffer_pool.h).
  std::vector<int64_t> idle_bytes;
  // Host memory for gradients that have memory there only until their update.
  int64_t gradient_room_bytes = INT64_MAX;
  std::vector<RoundTripCost> round_trips;  // by chunk; empty: no round trips
};

struct AccessPlan {
  std::vector<ArrayId> evict;        // before the fetches of this access
  std::vector<ArrayId> fetch;        // needed now, not on the device
  std::vector<ArrayId> evict_ahead;  // after the fetches, for the prefetches
  std::vector<ArrayId> prefetch;     // for later accesses, in the order of need
};

struct Plan {
  std::vector<AccessPlan> accesses;
  int64_t uploaded_bytes = 0;     // per step, in the steady state
  int64_t downloaded_bytes = 0;   // per step, in the steady state
  int64_t least_limit_bytes = 0;  // smallest limit_bytes that fits every access
};

// Arrays that are read or written, by access and the other way round. All plans of a timeline share it.
struct UseIndex {
  std::vector<std::vector<int64_t>> uses;  // by array: accesses, ascending
  std::vector<std::vector<int>> needed;    // by access: arrays, ascending
};

UseIndex index_uses(const PlanProblem& problem);

Plan make_plan(const PlanProblem& problem);
Plan make_plan(const PlanProblem& problem, const UseIndex& index);

uint64_t fingerprint(const Plan& plan);

// Bytes that chunk buffers may take at an access, prefetches included; INT64_MAX if unlimited.
int64_t room_bytes(const PlanProblem& problem, size_t access);

}  // namespace patrickstar
