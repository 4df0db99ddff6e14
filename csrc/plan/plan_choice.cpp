#include "plan/plan_choice.h"

#include <algorithm>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

#include "common/ablation.h"
#include "common/check.h"

namespace patrickstar {

namespace {

constexpr double kPredictionCaution = 1.5;
// Share of its own time by which a transfer beside compute lengthens the step: 8 B with 18 to 40 GB more took 3 to 7 %
// longer, 12 to 17 % of the time of these transfers (benchmark/results/h200-moved-bytes.txt).
constexpr double kHiddenTransferCost = 0.15;

int64_t largest_fetch_bytes(const PlanProblem& problem) {
  int64_t largest = 0;
  for (const ArrayCost& cost : problem.arrays) {
    if (cost.fetch_bytes > 0) largest = std::max(largest, cost.num_bytes);
  }
  return largest;
}

// Room that no access needs, at most the size of all arrays.
int64_t device_spare_bytes(const PlanProblem& problem) {
  int64_t spare = 0;
  for (const ArrayCost& cost : problem.arrays) spare += cost.num_bytes;
  for (size_t t = 0; t < problem.timeline->accesses.size(); ++t) {
    std::set<int> needed;
    int64_t left = room_bytes(problem, t);
    for (const ArrayUse& use : problem.timeline->accesses[t].uses) {
      if (use.mode == ArrayUseMode::kFinalise || !needed.insert(use.array.index()).second) continue;
      left -= problem.arrays[static_cast<size_t>(use.array.index())].num_bytes;
    }
    spare = std::min(spare, left);
  }
  return std::max<int64_t>(spare, 0);
}

// Two-phase updates are deferred in this many parts. Not measured: a finer split costs a simulated step per part.
constexpr int kParts = 16;
// Prefetch room and deferred updates depend on each other; each is chosen this often at most. Not measured.
constexpr int kRounds = 2;

// A plan for one amount of prefetch room; update times do not change it.
struct RoomPlan {
  int64_t prefetch_bytes = 0;
  Plan plan;
};

std::vector<RoomPlan> plans_by_room(PlanProblem problem) {
  std::vector<RoomPlan> plans;
  const UseIndex index = index_uses(problem);
  for (int64_t room : prefetch_candidates(problem)) {
    problem.prefetch_bytes = room;
    plans.push_back({room, make_plan(problem, index)});
  }
  return plans;
}

struct Predicted {
  const RoomPlan* with;
  Program program;
  double hidden_cost_seconds = 0;  // of its transfers
  SimulatedStep step;

  double seconds() const { return step.seconds + hidden_cost_seconds; }
};

double hidden_cost_seconds(const Plan& plan, const Rates& rates) {
  const double up = static_cast<double>(plan.uploaded_bytes) / rates.upload_gbps;
  const double down = static_cast<double>(plan.downloaded_bytes) / rates.download_gbps;
  return kHiddenTransferCost * (up + down) / 1e9;
}

// Keeps steps within kPredictionTolerance of the shortest.
void keep_shortest(std::vector<Predicted>& steps) {
  double least = steps.front().seconds();
  for (const Predicted& predicted : steps) least = std::min(least, predicted.seconds());
  const auto is_longer = [least](const Predicted& predicted) {
    return predicted.seconds() > least * (1 + kPredictionTolerance);
  };
  steps.erase(std::remove_if(steps.begin(), steps.end(), is_longer), steps.end());
}

Predicted choose_room(PlanProblem problem, const std::vector<RoomPlan>& plans, const Rates& rates,
                      const StepShape& shape) {
  const int64_t usual_room = problem.prefetch_bytes;
  const auto played = [&problem, &shape](const Predicted& predicted, const Rates& at) {
    problem.prefetch_bytes = predicted.with->prefetch_bytes;
    return play(problem, predicted.program, at, shape);
  };
  const Rates slower_rates = cautious(rates);
  std::vector<Predicted> steps;
  for (const RoomPlan& with : plans) {
    steps.push_back({&with, compile(problem, with.plan, shape), hidden_cost_seconds(with.plan, rates), {}});
    steps.back().step = played(steps.back(), slower_rates);
  }
  keep_shortest(steps);
  // Where updates bound every step under caution, the machine's own rates decide.
  for (Predicted& predicted : steps) predicted.step = played(predicted, rates);
  keep_shortest(steps);
  // The problem's own room if nothing is gained by another; then fewest bytes, then least room.
  const auto rank = [usual_room](const Predicted& predicted) {
    const auto& [room, plan] = *predicted.with;
    return std::make_tuple(room != usual_room, plan.uploaded_bytes + plan.downloaded_bytes, room);
  };
  return *std::min_element(steps.begin(), steps.end(),
                           [&rank](const Predicted& a, const Predicted& b) { return rank(a) < rank(b); });
}

// Defers the speculative updates of the chunks from `first_deferred` on.
std::vector<Recipe> delayed_updates(std::vector<Recipe> recipes, ChunkId first_deferred) {
  std::transform(recipes.begin() + first_deferred, recipes.end(), recipes.begin() + first_deferred, &made_deferred);
  return recipes;
}

// A simulated step whose updates from `first_deferred` on are deferred.
struct Delayed {
  ChunkId first_deferred = 0;
  StepShape shape;
  Program program;
  double seconds = 0;
};

// One step per number of deferred updates, fewest deferred first.
std::vector<Delayed> play_delayed(const PlanProblem& problem, const Plan& plan, const Rates& rates,
                                  const StepShape& earliest) {
  std::vector<ChunkId> in_two_passes;
  const auto num_chunks = static_cast<ChunkId>(earliest.updates.size());
  for (ChunkId chunk = 0; chunk < num_chunks; ++chunk) {
    const RecipeRow& row = row_of(earliest.updates[static_cast<size_t>(chunk)]);
    if (row.start == Start::kAhead && row.passes == Passes::kTwo) in_two_passes.push_back(chunk);
  }
  std::vector<Delayed> played;
  for (size_t part = kParts + 1; part-- > 0;) {
    const size_t kept = (in_two_passes.size() * part + kParts - 1) / kParts;
    const ChunkId first_deferred = kept == in_two_passes.size() ? num_chunks : in_two_passes[kept];
    if (!played.empty() && played.back().first_deferred == first_deferred) continue;
    StepShape shape = earliest;
    shape.updates = delayed_updates(std::move(shape.updates), first_deferred);
    Program program = compile(problem, plan, shape);
    const double seconds = play(problem, program, rates, shape).seconds;
    played.push_back({first_deferred, std::move(shape), std::move(program), seconds});
  }
  return played;
}

// Returns the shortest step's split point. Of equally short steps, the shortest under caution wins, then the one with
// fewest deferred updates.
ChunkId choose_first_deferred(PlanProblem problem, const RoomPlan& with, const Rates& rates,
                              const StepShape& earliest) {
  if (is_left_out(Mechanism::kDeferredUpdates)) return static_cast<ChunkId>(earliest.updates.size());
  problem.prefetch_bytes = with.prefetch_bytes;
  const std::vector<Delayed> played = play_delayed(problem, with.plan, rates, earliest);
  if (played.size() == 1) return played.front().first_deferred;
  double least = played.front().seconds;
  for (const Delayed& step : played) least = std::min(least, step.seconds);
  const Rates slower_rates = cautious(rates);
  const Delayed* best = nullptr;
  double best_seconds = 0;
  for (const Delayed& step : played) {
    if (step.seconds > least * (1 + kPredictionTolerance)) continue;
    const double seconds = play(problem, step.program, slower_rates, step.shape).seconds;
    if (best != nullptr && seconds >= best_seconds * (1 - kPredictionTolerance)) continue;
    best = &step;
    best_seconds = seconds;
  }
  return best->first_deferred;
}

// At most this many of kParts go to the GPU. Not measured.
constexpr int kMostRoundTrip = 12;
// Share of the step that round trips must save to be chosen. Not measured.
constexpr double kWorthRoundTrip = 0.02;

// Turns `part` of kParts of the optimizer-in-backward parameters on the host into round trips, evenly spread.
std::vector<Recipe> spread_round_trips(const StepShape& shape, int part) {
  std::vector<Recipe> recipes = shape.updates;
  double due = 0;
  for (size_t chunk = 0; chunk < recipes.size(); ++chunk) {
    const RecipeRow& row = row_of(recipes[chunk]);
    if (row.start != Start::kCommitted || row.states != Tier::kHost) continue;
    const auto numel = static_cast<double>(shape.numels[chunk]);
    due += numel * part / kParts;
    if (due < numel / 2) continue;
    due -= numel;
    recipes[chunk] = with_round_trip(recipes[chunk]);
  }
  return recipes;
}

// Nothing if round trips save too little or do not fit the device. `without`: the best step without round trips.
std::optional<PlanChoice> choose_round_trips(PlanProblem problem, const Predicted& without, const Rates& rates,
                                             StepShape shape, int64_t round_trip_bytes) {
  const double worth = without.step.seconds * (1 - kWorthRoundTrip);
  problem.fixed_bytes += round_trip_bytes;
  problem.prefetch_bytes = without.with->prefetch_bytes;
  double least = worth;
  const StepShape at_rest = shape;
  std::vector<Recipe> best;
  for (int part = 1; part <= kMostRoundTrip; ++part) {
    shape.updates = spread_round_trips(at_rest, part);
    const double seconds = play(problem, compile(problem, without.with->plan, shape), rates, shape).seconds;
    if (seconds >= least) continue;
    least = seconds * (1 - kPredictionTolerance);
    best = shape.updates;
  }
  if (best.empty()) return std::nullopt;
  shape.updates = std::move(best);
  std::vector<RoomPlan> plans = plans_by_room(problem);
  const Predicted predicted = choose_room(problem, plans, rates, shape);
  RoomPlan& with = plans[static_cast<size_t>(predicted.with - plans.data())];
  if (with.plan.least_limit_bytes > problem.limit_bytes || predicted.step.seconds > worth) return std::nullopt;
  return PlanChoice{std::move(with.plan), with.prefetch_bytes, predicted.step, std::move(shape.updates)};
}

}  // namespace

Rates cautious(Rates rates) {
  rates.upload_gbps /= kPredictionCaution;
  rates.download_gbps /= kPredictionCaution;
  rates.transfer_latency_seconds *= kPredictionCaution;
  rates.gather_gbps /= kPredictionCaution;
  rates.scatter_gbps /= kPredictionCaution;
  rates.collective_latency_seconds *= kPredictionCaution;
  rates.host_adam_params_per_second /= kPredictionCaution;
  rates.disk_read_gbps /= kPredictionCaution;
  rates.disk_write_gbps /= kPredictionCaution;
  return rates;
}

std::vector<int64_t> prefetch_candidates(const PlanProblem& problem) {
  const int64_t spare = device_spare_bytes(problem);
  const int64_t chunk = largest_fetch_bytes(problem);
  std::set<int64_t> rooms{0, problem.prefetch_bytes};
  if (chunk > 0) {
    for (int64_t room = chunk; room < spare; room *= 2) rooms.insert(room);
    rooms.insert(spare);
  }
  return {rooms.begin(), rooms.end()};
}

PlanChoice choose_plan(PlanProblem problem, const Rates& rates, const StepShape& shape, int64_t round_trip_bytes) {
  check_step(problem, rates, shape);
  PS_CHECK(round_trip_bytes == 0 || problem.round_trips.size() == shape.updates.size(), ArgumentError,
           "GPU round trips are allowed, and their bytes are given for ", problem.round_trips.size(), " of ",
           shape.updates.size(), " chunks; give one entry per chunk");
  std::vector<RoomPlan> plans = plans_by_room(problem);
  StepShape chosen = shape;
  auto first_deferred = static_cast<ChunkId>(shape.updates.size());
  Predicted predicted = choose_room(problem, plans, rates, chosen);
  for (int round = 0; round < kRounds; ++round) {
    const ChunkId next = choose_first_deferred(problem, *predicted.with, rates, shape);
    if (next == first_deferred) break;
    first_deferred = next;
    chosen.updates = delayed_updates(shape.updates, first_deferred);
    predicted = choose_room(problem, plans, rates, chosen);
  }
  if (round_trip_bytes > 0) {
    std::optional<PlanChoice> with_round_trips =
        choose_round_trips(problem, predicted, rates, chosen, round_trip_bytes);
    if (with_round_trips) return *std::move(with_round_trips);
  }
  RoomPlan& with = plans[static_cast<size_t>(predicted.with - plans.data())];
  return {std::move(with.plan), with.prefetch_bytes, predicted.step, std::move(chosen.updates)};
}

}  // namespace patrickstar
