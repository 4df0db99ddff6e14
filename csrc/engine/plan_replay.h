// A step on its way through its plan: which planned moment is running, and how closely the step follows the plan.
//
// A step consists of phases (forwards and backwards), a phase of moments. Ranks that replay a plan enqueue the plan's
// all-gathers and reduce-scatters in the plan's order, whatever their own models use ([Note: the same order on every
// rank], engine/collectives.h). So a rank whose model goes another way keeps its place in the plan:
//
//   its moment is             the rank
//   the next planned one      takes it
//   a later one of the phase  first takes its part in the planned moments between
//   none of them, and needs   computes with what is there; the plan waits
//   nothing that is absent
//   none of them              leaves the plan with all ranks (engine/rank_turns.h)
//
// With one rank nobody else waits, and a moment that is not the next planned one leaves the plan at once.
//
//   replay.set_plan(plan, next_use);   // after a step
//   replay.restart(timeline);          // a step begins
//   replay.begin_phase(Phase::kForward);
//   replay.find(phase, acquired, is_there);
//   replay.advance();
//   replay.end_step();
//
// Guarded by the engine's lock.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "chunk/layout.h"
#include "common/timeline.h"
#include "plan/planner.h"
#include "trace/recorder.h"

namespace patrickstar {

class PlanReplay {
 public:
  // How the running step follows its plan. Each is reached from those above it alone, but for kReady.
  enum class Course : uint8_t {
    kReady,     // the plan is that of the next step
    kExact,     // every moment so far was the planned one
    kSkipping,  // planned moments were left out
    kVarying,   // moments came between planned ones
    kNone,      // there is no plan, or the step has left it
  };
  enum class Fit : uint8_t { kNext, kLater, kBetween, kNone };
  struct Place {
    Fit fit = Fit::kNone;
    int64_t moment = -1;  // the planned one, for kNext and kLater
  };

  // An empty plan ends a replay in the middle of a step.
  void set_plan(Plan plan, NextUse next_use);
  // A step begins, whose plan was made for `timeline`. The caller keeps the timeline until the step is over.
  void restart(const Timeline& timeline);
  void leave() { course_ = Course::kNone; }
  void end_step();

  const Plan& plan() const { return plan_; }
  bool has_plan() const { return !plan_.moments.empty(); }
  Course course() const { return course_; }
  // The running step has followed its plan so far.
  bool is_running() const {
    return course_ == Course::kExact || course_ == Course::kSkipping || course_ == Course::kVarying;
  }

  // Index of the last planned moment that was begun or left out; -1 before the first.
  int64_t position() const { return next_ - 1; }
  // False when the plan has no such phase next; the step must leave the plan then, on all ranks alike.
  bool begin_phase(Phase phase, const Layout& layout);
  // How many planned moments are over when the running phase is; all of them where no phase was begun.
  int64_t phase_end() const { return phase_end_; }
  // Where a moment of the running phase belongs. `is_there`: it needs nothing that must be gathered.
  Place find(Phase phase, const std::vector<ArrayId>& acquired, bool is_there) const;
  bool is_next(Phase phase, const std::vector<ArrayId>& acquired) const;
  // The next planned moment begins; the model uses it, or leaves it out.
  void advance() { ++next_; }
  void note_skipped();
  void note_between() { course_ = Course::kVarying; }
  const Moment& next_moment() const { return timeline_->moments[static_cast<size_t>(next_)]; }
  const MomentPlan& current() const { return plan_.moments[static_cast<size_t>(position())]; }

  // The next reduce-scatter of a moment up to the running one; none is due before the one that popped last is enqueued.
  std::optional<ChunkId> due_scatter() const;
  void pop_scatter() { ++next_scatter_; }

  int64_t next_use(ArrayId id, int64_t recorded_position) const {
    return next_use_.empty() ? NextUse::kNever : next_use_.after(id, is_running() ? position() : recorded_position);
  }
  bool knows_uses() const { return !next_use_.empty(); }

  // The tide since the last planned moment began.
  void note_tide(int64_t num_bytes);
  int64_t planned_tide() const;
  // By planned moment: the highest of the running step.
  const std::vector<int64_t>& tides() const { return tides_; }

 private:
  struct Scatter {
    int64_t moment;
    ChunkId chunk;
  };
  bool matches(int64_t moment, Phase phase, const std::vector<ArrayId>& acquired) const;

  Plan plan_;
  NextUse next_use_;
  Course course_ = Course::kNone;
  const Timeline* timeline_ = nullptr;  // of the running step's plan
  std::vector<Scatter> scatters_;       // in their order
  std::vector<int64_t> tides_;
  int64_t next_ = 0;
  int64_t phase_begin_ = 0;
  int64_t phase_end_ = 0;
  size_t num_phases_ = 0;  // begun
  size_t next_scatter_ = 0;
};

}  // namespace patrickstar
