#include "plan/plan_choice.h"

#include <algorithm>
#include <set>
#include <tuple>
#include <utility>

namespace patrickstar {

namespace {

// [Note: caution] A step jitters, and one late fetch delays all that comes after it, while bytes and room that compute
// hides cost nothing. So plans are compared on a machine whose transfers, collectives and updates take so much longer.
constexpr double kCaution = 1.5;

Rates cautious(Rates rates) {
  rates.upload_gbps /= kCaution;
  rates.download_gbps /= kCaution;
  rates.transfer_latency_seconds *= kCaution;
  rates.gather_gbps /= kCaution;
  rates.scatter_gbps /= kCaution;
  rates.collective_latency_seconds *= kCaution;
  rates.host_adam_params_per_second /= kCaution;
  rates.disk_read_gbps /= kCaution;
  rates.disk_write_gbps /= kCaution;
  return rates;
}

int64_t largest_fetch_bytes(const PlanProblem& problem) {
  int64_t largest = 0;
  for (const ArrayCost& cost : problem.arrays) {
    if (cost.fetch_bytes > 0) largest = std::max(largest, cost.num_bytes);
  }
  return largest;
}

// What no moment needs for itself. More than all arrays together cannot be ahead of its use.
int64_t spare_bytes(const PlanProblem& problem) {
  int64_t spare = 0;
  for (const ArrayCost& cost : problem.arrays) spare += cost.num_bytes;
  for (size_t t = 0; t < problem.timeline->moments.size(); ++t) {
    std::set<int> needed;
    int64_t left = room_bytes(problem, t);
    for (const Access& access : problem.timeline->moments[t].accesses) {
      if (access.mode == AccessMode::kRetire || !needed.insert(access.array.index()).second) continue;
      left -= problem.arrays[static_cast<size_t>(access.array.index())].num_bytes;
    }
    spare = std::min(spare, left);
  }
  return std::max<int64_t>(spare, 0);
}

}  // namespace

std::vector<int64_t> prefetch_candidates(const PlanProblem& problem) {
  const int64_t spare = spare_bytes(problem);
  const int64_t chunk = largest_fetch_bytes(problem);
  std::set<int64_t> rooms{0, problem.prefetch_bytes};
  if (chunk > 0) {
    for (int64_t room = chunk; room < spare; room *= 2) rooms.insert(room);
    rooms.insert(spare);
  }
  return {rooms.begin(), rooms.end()};
}

PlanChoice choose_plan(PlanProblem problem, const Rates& rates, const StepShape& shape) {
  const Rates slower_rates = cautious(rates);
  const int64_t usual_room = problem.prefetch_bytes;
  std::vector<PlanChoice> choices;
  for (int64_t room : prefetch_candidates(problem)) {
    problem.prefetch_bytes = room;
    Plan plan = make_plan(problem);
    const SimulatedStep predicted = simulate(problem, plan, slower_rates, shape);
    choices.push_back({std::move(plan), room, predicted});
  }
  double least = choices.front().predicted.seconds;
  for (const PlanChoice& choice : choices) least = std::min(least, choice.predicted.seconds);
  // Too slow ones last; of the others the problem's own room, since nothing is gained by another one; then by bytes,
  // then by room.
  const auto rank = [least, usual = usual_room](const PlanChoice& choice) {
    const bool slower = choice.predicted.seconds > least * (1 + kPredictionTolerance);
    return std::make_tuple(slower, choice.prefetch_bytes != usual,
                           choice.plan.uploaded_bytes + choice.plan.downloaded_bytes, choice.prefetch_bytes);
  };
  PlanChoice best = std::move(*std::min_element(
      choices.begin(), choices.end(), [&rank](const PlanChoice& a, const PlanChoice& b) { return rank(a) < rank(b); }));
  problem.prefetch_bytes = best.prefetch_bytes;
  best.predicted = simulate(problem, best.plan, rates, shape);
  return best;
}

}  // namespace patrickstar
