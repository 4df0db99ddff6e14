// The choice of a plan with time: how much of the device's room prefetches get, and which of the host's updates begin
// in backward, decided by what the step will take.
//
// Room for prefetches lets transfers start earlier and keeps less on the device, so more is moved: whether that pays
// depends on the link, on updates, and on how long each moment computes. So plans for several rooms are made and played
// on the simulator. The least step predicted with caution wins; among those as short as it the least predicted without;
// among those as short again, the problem's own room if it is one of them, else the plan that moves the fewest bytes,
// then the one that needs the least room: transfers start as early as memory allows and no earlier than useful.
//
// [Note: updates that wait] An update in two passes ([Note: parameters first], engine/update_jobs.h) takes half as long
// again as one in one pass, or more. Where updates bound the step it therefore pays that those of the last chunks,
// which the next forward needs last, wait for the norm and are made in one pass beside that forward. How many is
// decided by playing steps in which all, 15 of 16, 14 of 16, ... and none of these updates begin in backward.
//
// [Note: visits] (engine/visits.h) Where the host's updates bound the step, the device makes some of them: of 0 to 12
// of 16 parts, spread over the chunks, the least that the shortest step takes. What is on the device for that is taken
// from the room of payloads.
//
//   PlanChoice choice = choose_plan(problem, rates, shape);   // measured rates and times of moments
//   choice.plan, choice.predicted.seconds
//   choice.recipes                                            // by chunk; those of updates that wait, and of visits
//
// Nothing here is shared; any thread may call it.
#pragma once

#include <cstdint>
#include <vector>

#include "plan/planner.h"
#include "plan/simulator.h"

namespace patrickstar {

// Steps whose predictions differ by less are as short as each other: the simulator cannot tell them apart.
constexpr double kPredictionTolerance = 0.005;

struct PlanChoice {
  Plan plan;
  int64_t prefetch_bytes = 0;  // of the problem that the plan solves
  SimulatedStep predicted;
  std::vector<Recipe> recipes;  // by chunk
};

// The rooms to try, ascending: none; one, two, four, ... of the largest array that can be fetched; all that no moment
// needs for itself; and problem.prefetch_bytes, so that the choice is, with caution, never slower than the problem as
// it is.
std::vector<int64_t> prefetch_candidates(const PlanProblem& problem);

// `shape.updates` begin as early as there is memory for them. Rooms are compared with caution (transfers and updates
// that take half as long again), numbers of updates without, and what is predicted is without. Throws ArgumentError as
// simulate() does.
// `visitor_bytes`: what chunks take that visit the device; 0: none may.
PlanChoice choose_plan(PlanProblem problem, const Rates& rates, const StepShape& shape, int64_t visitor_bytes = 0);

}  // namespace patrickstar
