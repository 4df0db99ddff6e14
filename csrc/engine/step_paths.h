// Plans of the paths that a model takes (plan/timeline_paths.h): a batch with images and one without, one task or
// another.
//
// The latest paths are kept, each with its plan. A step begins with the path of the step before. Where other kept paths
// branch off, it follows the one that the model takes. With several ranks, all ranks agree there: if their models
// differ, all follow the longest path, in which the other ranks leave accesses out (engine/plan_replay.h).
//
//   paths.keep(timeline);              // a step is over: its path comes first
//   paths.begin_step();
//   paths.next_branch(phase);          // the step follows current()
//   paths.take(branch, choices);
//
// All ranks keep the same paths in the same order. Guarded by the engine's lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <optional>
#include <vector>

#include "common/timeline.h"
#include "plan/plan_vote.h"
#include "plan/planner.h"
#include "plan/recipe.h"
#include "plan/simulator.h"
#include "plan/timeline_paths.h"
#include "trace/recorder.h"

namespace patrickstar {

// Bytes of chunk buffers on the device in one step.
struct ChunkBufferLimit {
  int64_t most_bytes = INT64_MAX;        // on-demand fetches evict beyond it
  int64_t ample_bytes = 0;               // DeviceBufferPool::set_ample_bytes()
  int64_t evaluation_bytes = INT64_MAX;  // as most_bytes, in an evaluation
};

struct StepPath {
  static constexpr int64_t kNoId = 0;

  void forget_times() {
    times.reset();
    num_measurements = 0;
  }

  int64_t id = kNoId;  // unique in the engine
  Timeline timeline;   // of the last step that took it
  Plan plan;
  NextUse next_use;
  ChunkBufferLimit buffer_limit;
  std::vector<Recipe> recipes;             // by chunk, of the plan; empty: the earliest possible ones
  std::vector<Recipe> planned_updates;     // earliest recipes that the plan was chosen for
  std::optional<StepTimes> times;          // of all ranks
  std::optional<SimulatedStep> predicted;  // if the plan was chosen by times
  int64_t prefetch_bytes = 0;              // if the plan was chosen by times
  int64_t round_trip_bytes = 0;            // device bytes for round-trip updates
  int64_t num_steps = 0;                   // steps that took it
  int64_t last_step = 0;                   // number of the last step that took it
  int num_measurements = 0;                // of `times` in this run
};

class StepPaths {
 public:
  // Bound of host memory and of comparisons; not measured.
  static constexpr size_t kMost = 8;
  static constexpr int kNone = -1;  // no choice

  // The kept path of such a step, or null.
  StepPath* find(const Timeline& timeline);
  StepPath* find(int64_t id);
  // Makes the path of such a step the first, and keeps it if it is new. The path that was taken longest ago goes.
  StepPath& keep(const Timeline& timeline);
  void clear();
  // Null if none is kept.
  StepPath* first() { return paths_.empty() ? nullptr : &paths_.front(); }
  const StepPath* first() const { return paths_.empty() ? nullptr : &paths_.front(); }
  std::list<StepPath>& all() { return paths_; }
  int size() const { return static_cast<int>(paths_.size()); }

  // A step begins that follows first().
  void begin_step();
  const StepPath& current() const { return *current_; }
  // Index of the first access at which other paths leave current() in this phase.
  std::optional<int64_t> next_branch(size_t phase) const;
  // Choices at next_branch(): the path that makes such an access there, whose phase ends there, or that begins such a
  // phase there. current() comes before others; kNone if there is none.
  int choice_of_access(size_t phase, Phase kind, const std::vector<ArrayId>& acquired) const;
  int choice_of_end(size_t phase) const;
  int choice_of_phase(Branch at, Phase kind) const;
  // The step follows the longest of the chosen paths (by rank) from `at` on, current() if none is chosen. Returns true
  // if that is another path than before.
  bool take(Branch at, const std::vector<int>& choices);

 private:
  struct Candidate {
    const StepPath* path;
    Branch branch;
  };

  std::list<StepPath>::iterator at(const Timeline& timeline);
  // Paths that branch off current() at `begin` or later.
  void find_candidates(Branch begin);
  int index_of(const StepPath* path) const;
  // current(), then the candidates that branch off at the first branch of this phase.
  template <class Fits>
  int choose(Branch at, const Fits& fits) const;

  std::list<StepPath> paths_;  // latest first
  int64_t last_id_ = StepPath::kNoId;
  const StepPath* current_ = nullptr;
  std::vector<Candidate> candidates_;  // paths that the running step may still take
};

}  // namespace patrickstar
