// The step planner makes the plan of the next step: from accesses alone at first, and from times once a step is
// measured.
//
// Measurement. If transfers take time that compute can hide, one early step is traced. It is the second step, since the
// first makes optimizer states, provided that no host memory is being prepared by then. Otherwise it is the first later
// step without such preparation, after two equal steps. One step later, when its work is complete, the trace becomes
// rates and times of accesses, if both steps were equal. From then on plans are chosen by predicted step time
// (plan/plan_choice.h). One later step is measured again, and its times replace the first ones. With several ranks, a
// step is traced if all ranks can, and plans use the slowest rank's times (plan/plan_vote.h).
//
// Times belong to a sequence of accesses and their arrays. They stay valid while steps repeat it, whatever the
// activation memory and wherever gradients leave the device. If a step differs, the planner forgets the times, uses the
// rule for prefetch room (plan/placement.h), and measures again. A model that differs in every step is never measured.
//
//   planner.begin_step();                       // before the tracer's
//   PlanVote vote = planner.vote(previous);     // the step is recorded
//   planner.end_step(previous, agreed(votes));  // and its trace complete
//
// Guarded by the engine's lock. Plans change no number.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "engine/gradient_flow.h"
#include "engine/pager.h"
#include "engine/residency.h"
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
              const GradientFlow& gradients, TraceRequests& traces);

  void begin_step();
  // The step is recorded; `previous` is the timeline of the step before. Returns this rank's input to the next plan.
  PlanVote vote(const Timeline& previous, StepWay way);
  // All ranks have voted, the timeline is as agreed, and the step's trace is complete. Returns true if the plan also
  // holds for the next step.
  bool end_step(const Timeline& previous, const PlanVote& agreed);
  // Before the first step: plans for the recorder's timeline, of an earlier run. That run's times, if any, serve until
  // a step of this run is measured. Throws ArgumentError if they do not belong to the timeline.
  void adopt(std::optional<StepTimes> times);
  // The next step fetches on demand.
  void forget_plan();
  // The next step follows the present plan, the one after it a new one.
  void plan_anew() { planned_updates_.clear(); }
  // forget_plan(), and forgets the last step as well.
  void forget_step();

  PlanProblem problem() const;
  // Empty before a step is measured, unless adopt() got times.
  const std::optional<StepTimes>& times() const { return times_; }
  const std::optional<SimulatedStep>& predicted() const { return predicted_; }

 private:
  enum class Stage : uint8_t {
    kUnmeasured,
    kAsked,     // requested a trace of the next step to begin
    kTraced,    // the step before this one was traced
    kMeasured,  // this rank has its own times, or all ranks' times
  };

  // Makes the traced step this rank's times, if it was equal to the one before.
  void measure(bool alike);
  void forget_times();
  bool can_measure(bool alike) const;
  // By chunk, as early as this rank can.
  std::vector<Recipe> earliest_recipes() const;
  PlanProblem untimed_problem() const;
  void make_next_plan();

  Pager& pager_;
  const ChunkStore& store_;
  Recorder& recorder_;
  Collectives& collectives_;
  const Residency& residency_;
  Updates& updates_;
  const GradientFlow& gradients_;
  TraceRequests& traces_;
  Stage stage_ = Stage::kUnmeasured;
  int64_t num_steps_ = 0;
  bool all_can_measure_ = false;            // in the next step
  std::vector<Recipe> agreed_updates_;      // by chunk, as early as all ranks can; empty before the first step
  std::vector<Recipe> planned_updates_;     // those that the present plan was chosen for
  std::optional<StepTimes> own_times_;      // until all ranks have theirs
  std::optional<StepTimes> times_;          // of all ranks
  std::optional<SimulatedStep> predicted_;  // of the present plan
  int64_t prefetch_bytes_ = 0;              // of the present plan, if it was chosen by times
  int64_t round_trip_bytes_ = 0;            // device bytes for round-trip updates of the present plan
};

}  // namespace patrickstar
