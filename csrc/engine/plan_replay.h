// The progress of a step through its plan.
//
// A step consists of phases (forwards and backwards), a phase of accesses. Ranks that replay a plan enqueue the plan's
// all-gathers and reduce-scatters in the plan's order, whatever their own models use
// ([Note: the same order on every rank], engine/collectives.h). A rank whose model diverges keeps its place in the
// plan:
//
//   its access is               the rank
//   the next planned one        takes it
//   a later one of the phase    first takes its part in the planned accesses between
//   no planned one, and needs   computes with what is there; the plan waits
//   nothing that is absent
//   any other                   leaves the plan with all ranks (engine/rank_turns.h)
//
// On a single rank every array is there. A step that takes another path for which there is a plan goes on in that plan
// (engine/step_paths.h).
//
//   replay.set_path(&path);            // after a step
//   replay.restart(layout);            // a step begins
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
#include "engine/step_paths.h"
#include "plan/planner.h"

namespace patrickstar {

class PlanReplay {
 public:
  // How the running step follows its plan. A step only moves down this list; kReady follows the end of a step.
  enum class Course : uint8_t {
    kReady,     // the plan is for the next step
    kExact,     // every access so far was the planned one
    kSkipping,  // planned accesses were left out
    kVarying,   // accesses came between planned ones
    kNone,      // there is no plan, or the step has left it
  };
  enum class Fit : uint8_t { kNext, kLater, kBetween, kNone };
  struct Position {
    Fit fit = Fit::kNone;
    int64_t access = -1;  // the planned access, for kNext and kLater
  };

  // The next step's plan; null for none, which ends a replay in the middle of a step. The caller keeps `path`.
  void set_path(const StepPath* path);
  void restart(const Layout& layout);
  // Goes on in another plan, of a path that makes the same accesses up to here.
  void switch_to(const StepPath& path, const Layout& layout);
  void leave() { course_ = Course::kNone; }
  void end_step();

  bool has_plan() const { return path_ != nullptr && !path_->plan.accesses.empty(); }
  // The next or the running step's; has_plan() must hold.
  const StepPath& path() const { return *path_; }
  Course course() const { return course_; }
  // True while the running step has followed its plan.
  bool is_running() const {
    return course_ == Course::kExact || course_ == Course::kSkipping || course_ == Course::kVarying;
  }

  // Index of the last planned access that was begun or left out; -1 before the first.
  int64_t position() const { return next_ - 1; }
  // False if the plan has no such phase next; all ranks must then leave the plan.
  bool begin_phase(Phase phase);
  // Phases begun in this step.
  size_t num_phases() const { return num_phases_; }
  // Index of the planned access after the running phase; the number of all accesses before the first phase.
  int64_t phase_end() const { return phase_end_; }
  // Fit of an access of the running phase. `is_there`: it needs no all-gather.
  Position find(Phase phase, const std::vector<ArrayId>& acquired, bool is_there) const;
  bool is_next(Phase phase, const std::vector<ArrayId>& acquired) const;
  // The next planned access begins, whether the model uses it or leaves it out.
  void advance() { ++next_; }
  void note_skipped();
  void note_between() { course_ = Course::kVarying; }
  const Access& next_access() const { return timeline().accesses[static_cast<size_t>(next_)]; }
  const AccessPlan& current() const { return path_->plan.accesses[static_cast<size_t>(position())]; }

  // The next reduce-scatter that is due at the running access. Call pop_scatter() before the next one.
  std::optional<ChunkId> due_scatter() const;
  void pop_scatter() { ++next_scatter_; }

  int64_t next_use(ArrayId id, int64_t recorded_position) const {
    if (!knows_uses()) return NextUse::kNever;
    return path_->next_use.after(id, is_running() ? position() : recorded_position);
  }
  bool knows_uses() const { return path_ != nullptr && !path_->next_use.empty(); }

  // Activation memory since the last planned access began.
  void note_activations(int64_t num_bytes);
  int64_t planned_activation_memory() const;
  // By planned access: peak activation memory in the running step.
  const std::vector<int64_t>& activation_levels() const { return activation_levels_; }

 private:
  struct Scatter {
    int64_t access;
    ChunkId chunk;
  };
  const Timeline& timeline() const { return path_->timeline; }
  // Index of the planned access after the phase; -1 if the plan has no such phase next.
  int64_t end_of(size_t num_phases_before, int64_t begin, Phase phase) const;
  void list_scatters(const Layout& layout);
  bool matches(int64_t access, Phase phase, const std::vector<ArrayId>& acquired) const;

  const StepPath* path_ = nullptr;
  Course course_ = Course::kNone;
  std::vector<Scatter> scatters_;  // in order
  std::vector<int64_t> activation_levels_;
  int64_t next_ = 0;
  int64_t phase_begin_ = 0;
  int64_t phase_end_ = 0;
  size_t num_phases_ = 0;  // begun in this step
  size_t next_scatter_ = 0;
};

}  // namespace patrickstar
