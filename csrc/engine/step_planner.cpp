#include "engine/step_planner.h"

#include <algorithm>
#include <utility>

#include "common/check.h"
#include "plan/step_measurement.h"

namespace patrickstar {

namespace {

// Steps until the second measurement; the first may have run while host memory was still being prepared. Predicted
// steps became shorter with it, from 2.63 to 2.34 s for 18.5 B (benchmark/results/h200-measured-early.txt). Other
// values were not measured.
constexpr int64_t kStepsUntilAgain = 8;

bool same_use(const ArrayUse& a, const ArrayUse& b) { return a.array == b.array && a.mode == b.mode; }

bool same_uses(const Access& x, const Access& y) {
  return std::equal(x.uses.begin(), x.uses.end(), y.uses.begin(), y.uses.end(), same_use);
}

// Equal accesses, except for gradients that leave the device.
bool same_needed_uses(const Access& x, const Access& y) {
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

template <class SameUses>
bool same_accesses(const Timeline& a, const Timeline& b, const SameUses& same) {
  return std::equal(a.accesses.begin(), a.accesses.end(), b.accesses.begin(), b.accesses.end(),
                    [&same](const Access& x, const Access& y) {
                      return x.phase == y.phase && x.acquired == y.acquired && same(x, y);
                    });
}

// A plan holds for accesses that differ in activation memory alone.
bool same_structure(const Timeline& a, const Timeline& b) { return same_accesses(a, b, same_uses); }

// Times hold while the model makes the same accesses.
bool same_way(const Timeline& a, const Timeline& b) { return same_accesses(a, b, same_needed_uses); }

bool activation_memory_rose(const Timeline& before, const Timeline& now) {
  for (size_t t = 0; t < now.accesses.size(); ++t) {
    if (now.accesses[t].activation_peak_bytes > before.accesses[t].activation_peak_bytes) return true;
  }
  return false;
}

}  // namespace

StepPlanner::StepPlanner(Pager& pager, Recorder& recorder, Collectives& collectives, const Residency& residency,
                         Updates& updates, const GradientFlow& gradients, TraceRequests& traces)
    : pager_(pager),
      store_(pager.store()),
      recorder_(recorder),
      collectives_(collectives),
      residency_(residency),
      updates_(updates),
      gradients_(gradients),
      traces_(traces) {}

void StepPlanner::begin_step() {
  if (stage_ != Stage::kUnmeasured || !all_can_measure_) return;
  traces_.ask(TraceReader::kPlanner);
  stage_ = Stage::kAsked;
}

PlanVote StepPlanner::vote(const Timeline& previous, StepWay way) {
  const bool alike = way == StepWay::kAsBefore || same_way(previous, recorder_.last());
  measure(alike);
  return {can_measure(alike), !pager_.plan().accesses.empty(), earliest_recipes(), own_times_};
}

bool StepPlanner::can_measure(bool alike) const {
  if (stage_ != Stage::kUnmeasured) return true;
  const bool may_go_alike = alike || num_steps_ == 0;
  return may_go_alike && residency_.prefetches_far() && !pager_.memory().arena().is_preparing();
}

void StepPlanner::forget_times() {
  own_times_.reset();
  times_.reset();
  if (stage_ == Stage::kMeasured) stage_ = Stage::kUnmeasured;
}

void StepPlanner::measure(bool alike) {
  if (!alike) own_times_.reset();
  if (stage_ == Stage::kMeasured && !alike) stage_ = Stage::kUnmeasured;
  if (stage_ != Stage::kTraced) return;
  stage_ = Stage::kUnmeasured;
  const std::optional<StepTrace> trace = traces_.take(TraceReader::kPlanner);
  if (!trace || !alike || trace->outcome != StepOutcome::kApplied) return;
  own_times_ = {measured_rates(*trace), {measured_compute_seconds(*trace), {}, {}}};
  own_times_->shape.activations = recorder_.last_copies();
  stage_ = Stage::kMeasured;
}

bool StepPlanner::end_step(const Timeline& previous, const PlanVote& agreed) {
  if (++num_steps_ == kStepsUntilAgain && stage_ == Stage::kMeasured) stage_ = Stage::kUnmeasured;
  all_can_measure_ = agreed.can_measure;
  agreed_updates_ = agreed.updates;
  if (stage_ == Stage::kAsked && traces_.is_ready(TraceReader::kPlanner)) stage_ = Stage::kTraced;
  if (!same_way(previous, recorder_.last())) {
    forget_times();
  } else if (agreed.times) {
    own_times_.reset();
    times_ = agreed.times;
  }
  const bool holds = agreed.has_plan && !agreed.times && same_structure(previous, recorder_.last()) &&
                     !activation_memory_rose(previous, recorder_.last()) &&
                     !(times_ && planned_updates_ != agreed_updates_);
  if (!holds) make_next_plan();
  return holds;
}

void StepPlanner::adopt(std::optional<StepTimes> times) {
  if (times && residency_.prefetches_far()) {
    const std::vector<Recipe> now = earliest_recipes();
    std::vector<Recipe>& then = times->shape.updates;
    PS_CHECK(now.size() == then.size(), ArgumentError, "the plan has updates of ", then.size(), " chunks, the layout ",
             now.size(), " chunks; make the plan again");
    // The present tiers are known; only the plan's run saw which updates can start before the norm.
    for (size_t chunk = 0; chunk < now.size(); ++chunk) {
      const RecipeRow& known = row_of(now[chunk]);
      const RecipeRow& seen = row_of(then[chunk]);
      const bool on_host = known.states == Tier::kHost && seen.states == Tier::kHost;
      const bool may_start = on_host && known.start == Start::kAfterNorm && starts_in_backward(seen);
      if (!may_start) then[chunk] = now[chunk];
      then[chunk] = without_round_trip(then[chunk]);  // round trips are chosen again
    }
    times_ = std::move(times);
  }
  make_next_plan();
}

void StepPlanner::forget_plan() {
  pager_.set_plan({}, {});
  predicted_.reset();
}

void StepPlanner::forget_step() {
  recorder_.set_last({});
  forget_plan();
}

PlanProblem StepPlanner::untimed_problem() const {
  std::vector<uint8_t> states_on_device;
  for (Recipe recipe : agreed_updates_.empty() ? earliest_recipes() : agreed_updates_) {
    const auto chunk = static_cast<ChunkId>(states_on_device.size());
    // The resting tier of quantised values follows from agreed facts as well.
    const bool is_quantized = store_.chunk(chunk).is_quantized();
    states_on_device.push_back(is_quantized ? store_.resting_tier(chunk) == Tier::kDevice
                                            : row_of(recipe).states == Tier::kDevice);
  }
  return residency_.plan_problem(recorder_.last(), states_on_device);
}

PlanProblem StepPlanner::problem() const {
  PlanProblem problem = untimed_problem();
  if (predicted_) problem.prefetch_bytes = prefetch_bytes_;
  problem.fixed_bytes += round_trip_bytes_;
  return problem;
}

std::vector<Recipe> StepPlanner::earliest_recipes() const {
  const UpdateStart start = gradients_.accumulates() ? UpdateStart::kAfterNorm : updates_.earliest_start();
  std::vector<Recipe> result;
  for (ChunkId chunk = 0; chunk < store_.num_chunks(); ++chunk) result.push_back(updates_.earliest(chunk, start));
  return result;
}

void StepPlanner::make_next_plan() {
  const Timeline& last = recorder_.last();
  const PlanProblem untimed = untimed_problem();
  predicted_.reset();
  Plan plan;
  std::vector<Recipe> recipes;
  round_trip_bytes_ = 0;
  if (times_) {
    StepShape& shape = times_->shape;
    if (num_steps_ > 0) shape.updates = agreed_updates_;
    planned_updates_ = shape.updates;
    describe_updates(store_.layout(), shape);
    const bool may_round_trip = updates_.may_round_trip() && !gradients_.accumulates();
    const int64_t round_trip_buffers = !may_round_trip ? 0 : round_trip_bytes(store_.layout());
    PlanChoice choice = choose_plan(untimed, times_->rates, shape, round_trip_buffers);
    plan = std::move(choice.plan);
    recipes = choice.recipes;
    shape.updates = std::move(choice.recipes);
    round_trip_bytes_ = any_round_trips(recipes) ? round_trip_buffers : 0;
    prefetch_bytes_ = choice.prefetch_bytes;
    predicted_ = choice.predicted;
  } else {
    plan = make_plan(untimed);
  }
  updates_.follow(std::move(recipes));
  collectives_.check_same_plan(fingerprint(plan));
  pager_.set_plan(std::move(plan), NextUse(last, store_.num_arrays()));
}

}  // namespace patrickstar
