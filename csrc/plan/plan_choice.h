// The choice of a plan with time: how much of the device's room prefetches get, decided by what the step will take.
//
// Room for prefetches lets transfers start earlier and keeps less on the device, so more is moved: whether that pays
// depends on the link, on updates, and on how long each moment computes. So plans for several rooms are made and played
// on the simulator. The least predicted step wins; among those as short as it, the problem's own room if it is one of
// them, else the plan that moves the fewest bytes, then the one that needs the least room: transfers start as early as
// memory allows and no earlier than useful.
//
//   PlanChoice choice = choose_plan(problem, rates, shape);   // measured rates and times of moments
//   choice.plan, choice.predicted.seconds
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
};

// The rooms to try, ascending: none; one, two, four, ... of the largest array that can be fetched; all that no moment
// needs for itself; and problem.prefetch_bytes, so that the choice is, with caution, never slower than the problem as
// it is.
std::vector<int64_t> prefetch_candidates(const PlanProblem& problem);

// Compared with caution (transfers and updates that take half as long again), predicted without. Throws ArgumentError
// as simulate() does.
PlanChoice choose_plan(PlanProblem problem, const Rates& rates, const StepShape& shape);

}  // namespace patrickstar
