// The step planner makes the plan of the next step: from accesses alone at first, and from times once a step is
// measured.
//
// Measurement. If transfers take time that compute can hide, one early step is traced. It is the second step, since the
// first makes optimizer states, provided that no host memory is being prepared by then. Otherwise it is the first later
// step without such preparation that follows a step like an earlier one. One step later, when its work is complete, the
// trace becomes rates and times of accesses. From then on plans are chosen by predicted step time (plan/plan_choice.h).
// One later step is measured again; of both, the faster times count. With several ranks, a step is traced if all
// ranks can, and plans use the slowest rank's times (plan/plan_vote.h).
//
// Each path that the model takes has its own plan and times (engine/step_paths.h). A trace counts for the path that its
// step took, if an earlier step took it too. Times stay valid while steps repeat the path, whatever the activation
// memory and wherever gradients leave the device. Without times, a plan uses the rule for prefetch room
// (plan/placement.h). A model that differs in every step is never measured.
//
//   planner.begin_step();                   // before the tracer's
//   PlanVote vote = planner.vote(way);      // the step is recorded
//   planner.end_step(agreed(votes));        // and its trace complete
//
// Guarded by the engine's lock. Plans change no number.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "engine/gradient_flow.h"
#include "engine/pager.h"
#include "engine/residency.h"
#include "engine/step_paths.h"
#include "engine/updates.h"
#include "plan/plan_choice.h"
#include "plan/plan_vote.h"
#include "trace/trace_requests.h"

namespace patrickstar {

// How a recorded step followed its plan.
enum class StepWay : uint8_t {
  kAsRecorded,
  kAsBefore,  // followed the plan, but not access by access: its accesses and times do not count
};

class StepPlanner {
 public:
  StepPlanner(Pager& pager, Recorder& recorder, Collectives& collectives, const Residency& residency, Updates& updates,
              const GradientFlow& gradients, TraceRequests& traces, StepPaths& paths);

  void begin_step();
  // The step is recorded. Returns this rank's input to the next plan.
  PlanVote vote(StepWay way);
  // All ranks have voted, the timeline is as agreed, and the step's trace is complete. Returns true if the path's plan
  // also holds for the next step.
  bool end_step(const PlanVote& agreed);
  // Before the first step: plans for the recorder's timeline, of an earlier run. That run's times, if any, serve until
  // a step of this run is measured. Throws ArgumentError if they do not belong to the timeline.
  void adopt(std::optional<StepTimes> times);
  // The next step fetches on demand.
  void forget_plan();
  // The next step follows the present plan, the one after it a new one.
  void plan_anew();
  // forget_plan(), and forgets the last step and all paths.
  void forget_step();

  PlanProblem problem() const;
  // Times of the last step's path. Empty before it is measured, unless adopt() got times.
  const std::optional<StepTimes>& times() const;
  const std::optional<SimulatedStep>& predicted() const;
  // Steps of the last step's path that were measured in this run; at most 2.
  int num_measurements() const;

 private:
  enum class Stage : uint8_t {
    kIdle,
    kAsked,   // requested a trace of the next step to begin
    kTraced,  // a step since was to be traced
  };

  // True if a trace of a step that takes this path is wanted.
  bool is_due(const StepPath& path) const;
  void take_times();
  // `path_of_step`: StepPath::id, or kNoId if no earlier step took the path.
  void end_measurement(const PlanVote& agreed, int64_t path_of_step);
  // By chunk, as early as this rank can.
  std::vector<Recipe> earliest_recipes() const;
  PlanProblem untimed_problem(const Timeline& timeline) const;
  void make_plan_of(StepPath& path);
  // The next step follows the first path's plan.
  void replay_first();

  Pager& pager_;
  const ChunkStore& store_;
  Recorder& recorder_;
  Collectives& collectives_;
  const Residency& residency_;
  Updates& updates_;
  const GradientFlow& gradients_;
  TraceRequests& traces_;
  StepPaths& paths_;
  Stage stage_ = Stage::kIdle;
  int64_t num_steps_ = 0;
  bool all_can_measure_ = false;        // in the next step
  std::vector<Recipe> agreed_updates_;  // by chunk, as early as all ranks can; empty before the first step
  StepWay last_way_ = StepWay::kAsRecorded;
  // The traced step, or the last one that was to be traced.
  int64_t traced_path_ = StepPath::kNoId;
  StepWay traced_way_ = StepWay::kAsRecorded;
  std::vector<ActivationCopies> traced_copies_;
  std::optional<StepTimes> own_times_;  // until all ranks have theirs
};

}  // namespace patrickstar
