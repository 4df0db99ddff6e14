#include "engine/step_planner.h"

#include <algorithm>
#include <utility>

#include "common/check.h"
#include "plan/step_measurement.h"
#include "plan/timeline_paths.h"

namespace patrickstar {

namespace {

// Steps until the second measurement: predicted steps became shorter with it, from 2.63 to 2.34 s for 18.5 B
// (benchmark/results/h200-measured-early.txt). Other values were not measured.
constexpr int64_t kStepsUntilAgain = 8;
// A path that has not come back for so many steps is not waited for: a traced step drains the device's queue.
constexpr int64_t kStepsOfWaiting = 8;

}  // namespace

StepPlanner::StepPlanner(Pager& pager, Recorder& recorder, Collectives& collectives, const Residency& residency,
                         Updates& updates, const GradientFlow& gradients, TraceRequests& traces, StepPaths& paths)
    : pager_(pager),
      store_(pager.store()),
      recorder_(recorder),
      collectives_(collectives),
      residency_(residency),
      updates_(updates),
      gradients_(gradients),
      traces_(traces),
      paths_(paths) {}

bool StepPlanner::is_due(const StepPath& path) const {
  if (num_steps_ - path.last_step > kStepsOfWaiting) return false;
  return path.num_measurements == 0 || (path.num_measurements == 1 && path.num_steps >= kStepsUntilAgain);
}

void StepPlanner::begin_step() {
  if (stage_ != Stage::kIdle || !all_can_measure_) return;
  const std::list<StepPath>& paths = paths_.all();
  if (std::none_of(paths.begin(), paths.end(), [this](const StepPath& path) { return is_due(path); })) return;
  traces_.ask(TraceReader::kPlanner);
  stage_ = Stage::kAsked;
}

PlanVote StepPlanner::vote(StepWay way) {
  if (stage_ == Stage::kTraced) take_times();
  if (!own_times_) traced_copies_ = recorder_.last_copies();
  const bool awaits_trace = stage_ == Stage::kTraced && !own_times_ && traced_way_ == StepWay::kAsRecorded;
  last_way_ = way;
  const StepPath* path = paths_.find(recorder_.last());
  const bool alike = way == StepWay::kAsBefore || num_steps_ == 0 ||
                     (path != nullptr && same_needed_uses(path->timeline, recorder_.last()));
  const bool can_measure = alike && residency_.prefetches_far() && !pager_.memory().arena().is_preparing();
  return {can_measure, pager_.replay().has_plan(), earliest_recipes(), awaits_trace, traced_path_, own_times_};
}

void StepPlanner::take_times() {
  const std::optional<StepTrace> trace = traces_.take(TraceReader::kPlanner);
  if (!trace || trace->outcome != StepOutcome::kApplied) return;
  own_times_ = {measured_rates(*trace), {measured_compute_seconds(*trace), {}, {}}};
  own_times_->shape.activations = traced_copies_;
}

bool StepPlanner::end_step(const PlanVote& agreed) {
  ++num_steps_;
  all_can_measure_ = agreed.can_measure;
  agreed_updates_ = agreed.updates;
  const Timeline& last = recorder_.last();
  pager_.set_path(nullptr);  // keep() may drop the path that the step began with
  StepPath& path = paths_.keep(last);
  const bool is_known = !path.plan.accesses.empty();
  ++path.num_steps;
  path.last_step = num_steps_;
  if (!same_needed_uses(path.timeline, last)) path.forget_times();
  const bool holds = is_known && agreed.has_plan && same_uses(path.timeline, last) &&
                     !activation_memory_rose(path.timeline, last) && path.planned_updates == agreed_updates_;
  path.timeline = last;
  path.buffer_limit = residency_.chunk_buffer_limit(last);
  if (!holds) path.plan = {};
  end_measurement(agreed, is_known ? path.id : StepPath::kNoId);
  const bool still_holds = !path.plan.accesses.empty();
  for (StepPath& kept : paths_.all()) {
    if (kept.plan.accesses.empty()) make_plan_of(kept);
  }
  replay_first();
  return still_holds;
}

// Ranks ask in the same step. A user's trace puts off that of a rank by a step or more (TraceRequests); the others keep
// their times until it has its own.
void StepPlanner::end_measurement(const PlanVote& agreed, int64_t path_of_step) {
  if (stage_ == Stage::kIdle) return;
  if (stage_ == Stage::kTraced && !agreed.awaits_trace) {
    StepPath* const traced = paths_.find(agreed.timed_path);
    if (traced != nullptr && agreed.times && is_due(*traced)) {
      traced->times = traced->num_measurements > 0 ? undisturbed(*traced->times, *agreed.times) : *agreed.times;
      ++traced->num_measurements;
      traced->plan = {};
    }
    own_times_.reset();
    stage_ = Stage::kIdle;
  } else if (!own_times_) {
    traced_path_ = path_of_step;
    traced_way_ = last_way_;
    stage_ = Stage::kTraced;
  }
}

void StepPlanner::adopt(std::optional<StepTimes> times) {
  StepPath& path = paths_.keep(recorder_.last());
  path.buffer_limit = residency_.chunk_buffer_limit(path.timeline);
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
    path.times = std::move(times);
  }
  make_plan_of(path);
  replay_first();
}

void StepPlanner::replay_first() {
  StepPath& path = *paths_.first();
  updates_.follow(path.recipes);
  pager_.set_path(&path);
}

void StepPlanner::forget_plan() { pager_.set_path(nullptr); }

void StepPlanner::plan_anew() {
  for (StepPath& path : paths_.all()) path.planned_updates.clear();
}

void StepPlanner::forget_step() {
  recorder_.set_last({});
  forget_plan();
  paths_.clear();
}

const std::optional<StepTimes>& StepPlanner::times() const {
  static const std::optional<StepTimes> none;
  return paths_.first() == nullptr ? none : paths_.first()->times;
}

int StepPlanner::num_measurements() const { return paths_.first() == nullptr ? 0 : paths_.first()->num_measurements; }

const std::optional<SimulatedStep>& StepPlanner::predicted() const {
  static const std::optional<SimulatedStep> none;
  return pager_.replay().has_plan() ? pager_.replay().path().predicted : none;
}

PlanProblem StepPlanner::untimed_problem(const Timeline& timeline) const {
  std::vector<uint8_t> states_on_device;
  for (Recipe recipe : agreed_updates_.empty() ? earliest_recipes() : agreed_updates_) {
    const auto chunk = static_cast<ChunkId>(states_on_device.size());
    // The resting tier of quantised values follows from agreed facts as well.
    const bool is_quantized = store_.chunk(chunk).is_quantized();
    states_on_device.push_back(is_quantized ? store_.resting_tier(chunk) == Tier::kDevice
                                            : row_of(recipe).states == Tier::kDevice);
  }
  return residency_.plan_problem(timeline, states_on_device);
}

PlanProblem StepPlanner::problem() const {
  PlanProblem problem = untimed_problem(recorder_.last());
  if (!pager_.replay().has_plan()) return problem;
  const StepPath& path = pager_.replay().path();
  if (path.predicted) problem.prefetch_bytes = path.prefetch_bytes;
  problem.fixed_bytes += path.round_trip_bytes;
  return problem;
}

std::vector<Recipe> StepPlanner::earliest_recipes() const {
  const UpdateStart start = gradients_.accumulates() ? UpdateStart::kAfterNorm : updates_.earliest_start();
  std::vector<Recipe> result;
  for (ChunkId chunk = 0; chunk < store_.num_chunks(); ++chunk) result.push_back(updates_.earliest(chunk, start));
  return result;
}

void StepPlanner::make_plan_of(StepPath& path) {
  const PlanProblem untimed = untimed_problem(path.timeline);
  path.predicted.reset();
  path.recipes.clear();
  path.round_trip_bytes = 0;
  path.planned_updates = agreed_updates_.empty() ? earliest_recipes() : agreed_updates_;
  if (path.times) {
    StepShape& shape = path.times->shape;
    if (num_steps_ > 0) shape.updates = agreed_updates_;
    path.planned_updates = shape.updates;
    describe_updates(store_.layout(), shape);
    const bool may_round_trip = updates_.may_round_trip() && !gradients_.accumulates();
    const int64_t round_trip_buffers = !may_round_trip ? 0 : round_trip_bytes(store_.layout());
    PlanChoice choice = choose_plan(untimed, path.times->rates, shape, round_trip_buffers);
    path.plan = std::move(choice.plan);
    path.recipes = choice.recipes;
    shape.updates = std::move(choice.recipes);
    path.round_trip_bytes = any_round_trips(path.recipes) ? round_trip_buffers : 0;
    path.prefetch_bytes = choice.prefetch_bytes;
    path.predicted = choice.predicted;
  } else {
    path.plan = make_plan(untimed);
  }
  collectives_.check_same_plan(fingerprint(path.plan));
  path.next_use = NextUse(path.timeline, store_.num_arrays());
  ++pager_.memory().counters().num_plans;
}

}  // namespace patrickstar
