// Chooses a plan by simulated step time: how much device room prefetches get, which host updates start in backward, and
// which run as GPU round trips (engine/round_trips.h).
//
// Prefetch room. More room starts transfers earlier but keeps less on the device, so more bytes move. The simulator
// plays one plan per candidate room. The ranking:
// - shortest step under caution (transfers and updates 1.5 times as long);
// - then shortest step at measured rates;
// - then the problem's own room, fewest bytes, least room.
//
// Steps within kPredictionTolerance count as equal. Hidden transfers count with a share of their time: they use memory
// that compute and updates use too.
//
// Deferred updates. A two-phase update (engine/update_jobs.h) takes half as long again as a one-pass update, or more.
// Where updates bound the step, updates of the last chunks are deferred until the norm and run in one pass beside the
// next forward. The simulator plays steps that start all, 15 of 16, 14 of 16, ... and none of these updates in
// backward.
//
// GPU round trips. Where host updates bound the step, the GPU makes 0 to 12 of 16 parts of them, the fewest that give
// the shortest step. Their pieces take room from chunk buffers.
//
//   PlanChoice choice = choose_plan(problem, rates, shape);   // measured rates and access times
//   choice.plan, choice.predicted.seconds
//   choice.recipes                                            // by chunk
//
// No shared state; any thread may call it.
#pragma once

#include <cstdint>
#include <vector>

#include "plan/planner.h"
#include "plan/simulator.h"

namespace patrickstar {

// Relative difference below which the simulator cannot tell two steps apart. Not measured.
constexpr double kPredictionTolerance = 0.005;

// Plans are compared on a machine whose transfers, collectives and updates take 1.5 times as long. Steps jitter, and
// one late fetch delays everything after it. Not measured by itself.
Rates cautious(Rates rates);

struct PlanChoice {
  Plan plan;
  int64_t prefetch_bytes = 0;  // the room that the plan was made with
  SimulatedStep predicted;
  std::vector<Recipe> recipes;  // by chunk
};

// Rooms to try, ascending: 0; 1, 2, 4, ... times the largest array that can be fetched; all room that no access needs;
// and problem.prefetch_bytes.
std::vector<int64_t> prefetch_candidates(const PlanProblem& problem);

// `shape.updates`: the earliest recipes that fit memory. `predicted` is at measured rates. `round_trip_bytes`: device
// memory of round trips; 0: none allowed. Throws ArgumentError as simulate() does.
PlanChoice choose_plan(PlanProblem problem, const Rates& rates, const StepShape& shape, int64_t round_trip_bytes = 0);

}  // namespace patrickstar
