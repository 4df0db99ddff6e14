// The step planner makes the plan of the next step: by moments alone at first, with time once a step was measured.
//
// [Note: the measured step] Where transfers take time that compute can hide, one early step is traced without anybody
// asking: the second, since the first makes optimizer states, if no host memory is being prepared by then; else the
// first later one of which that holds, after two that went alike. One step later, when nothing of it runs any more, its
// trace becomes rates and times of moments if both went alike, and from then on plans are chosen by their predicted
// steps (plan/plan_choice.h). One later step is measured in the same way, and its times take the place of the first.
// With several ranks all of this is as they agree: a step is traced when it can be on all, and plans follow from what
// the slowest measured ([Note: one plan on all ranks]).
//
// Times belong to the way a model goes, that is, to its moments and what they use: they stay while steps go alike in
// that, whatever the tide, and wherever gradients leave the device, which follows from where states are and what room
// the host has. A step that goes otherwise has the planner forget them, follow the rule for the room of prefetches
// (plan/placement.h), and measure again. A model that goes otherwise in every step is never measured.
//
//   planner.begin_step();                       // before the tracer's
//   PlanVote vote = planner.vote(previous);     // the step is recorded
//   planner.end_step(previous, agreed(votes));  // and its trace complete
//
// Guarded by the engine's lock. What it decides changes no number.
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

// What a step that was recorded says of the model's way.
enum class StepWay : uint8_t {
  kAsRecorded,
  kAsBefore,  // it followed a plan, but not moment by moment: no new way, and no times of its moments
};

class StepPlanner {
 public:
  StepPlanner(Pager& pager, Recorder& recorder, Collectives& collectives, const Residency& residency, Updates& updates,
              const GradientFlow& gradients, TraceRequests& traces);

  // A training step begins.
  void begin_step();
  // It is recorded; the step before it went as `previous` says. What this rank alone knows of the next plan.
  PlanVote vote(const Timeline& previous, StepWay way);
  // All ranks have voted, the timeline is as they agree, and the trace of the step is complete.
  // Returns whether the plan holds for the next step as well.
  bool end_step(const Timeline& previous, const PlanVote& agreed);
  // Before the first step, the recorder's timeline being that of an earlier run: plans for it, with that run's times,
  // if there are any, until a step of this one is measured. Throws ArgumentError when they are not those of the
  // timeline.
  void adopt(std::optional<StepTimes> times);
  // The next step fetches on demand.
  void forget_plan();
  // The next step follows the plan, and the one after it a plan that is made anew.
  void plan_anew() { planned_updates_.clear(); }
  // The same, and there was no last step either.
  void forget_step();

  // What the present plan solves, for the last timeline.
  PlanProblem problem() const;
  // None before a step was measured, or where nobody gave any.
  const std::optional<StepTimes>& times() const { return times_; }
  const std::optional<SimulatedStep>& predicted() const { return predicted_; }

 private:
  enum class Stage : uint8_t {
    kUnmeasured,
    kAsked,     // for a trace of the next step that begins
    kTraced,    // in the step before this one
    kMeasured,  // here; all ranks' times, or this one's until all have theirs
  };

  // The traced step becomes this rank's times, if it went as usual.
  void measure(bool alike);
  void forget_times();
  bool can_measure(bool alike) const;
  // By chunk, as early as things here allow.
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
  std::vector<Recipe> agreed_updates_;      // by chunk, as early as all ranks can; none before the first step
  std::vector<Recipe> planned_updates_;     // those that the present plan was chosen for
  std::optional<StepTimes> own_times_;      // until all ranks have theirs
  std::optional<StepTimes> times_;          // of all ranks
  std::optional<SimulatedStep> predicted_;  // of the present plan
  int64_t prefetch_bytes_ = 0;              // of the present plan, if it was chosen
  int64_t visitor_bytes_ = 0;               // of the device, for chunks that visit it by the present plan
};

}  // namespace patrickstar
