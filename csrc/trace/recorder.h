// Records the timeline of the running step, and remembers the last complete one.
//
//   recorder.begin_moment(Phase::kForward, acquired, tide_peak_of_the_moment_before);
//   recorder.add({grad, AccessMode::kWrite});
//   recorder.note_tide(tide_peak);   // of the last moment
//   recorder.finish_step();          // the recording becomes last()
//
// Guarded by the runtime's lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "common/timeline.h"

namespace patrickstar {

class Recorder {
 public:
  // `tide_peak` is the highest tide since the moment before began.
  void begin_moment(Phase phase, std::vector<ArrayId> acquired, int64_t tide_peak);
  void begin_forward() { forward_begin_ = running_.moments.size(); }
  // A forward or a backward is over.
  void end_phase() { running_.phase_ends.push_back(static_cast<int64_t>(running_.moments.size())); }
  // As if the running forward had not begun.
  void undo_forward();
  // Adds an access to the running moment; dropped when no moment has begun.
  void add(Access access);
  // Adds an access to the `position`-th moment of the running step.
  void add_at(int64_t position, Access access);
  // The running moment's tide was at least so high.
  void note_tide(int64_t tide_peak);
  // So many bytes of activations are away from the device from now on.
  void note_absent(int64_t num_bytes);
  // So many more of them begin to leave in the running moment, or to come back, or are needed in it.
  void note_copies(const ActivationCopies& more);
  // What was away stays in later steps, as far as the tide is `most_bytes` at most with it: so the running step's does.
  void count_absent(int64_t most_bytes);
  void finish_step();
  // As if `timeline` had been the last step.
  void set_last(Timeline timeline);
  // Forgets the running step's recording (an exception left the step).
  void abandon_step();

  // Of the last step that was recorded, by moment; empty: nothing left.
  const std::vector<ActivationCopies>& last_copies() const { return last_copies_; }
  bool has_last() const { return has_last_; }
  const Timeline& last() const { return last_; }
  const Timeline& running() const { return running_; }
  // Index of the running moment in the step; -1 before the first.
  int64_t position() const { return static_cast<int64_t>(running_.moments.size()) - 1; }

 private:
  Timeline running_;
  std::vector<int64_t> absent_;           // by moment of it, at most
  std::vector<ActivationCopies> copies_;  // by moment of it
  int64_t absent_bytes_ = 0;              // now
  size_t forward_begin_ = 0;              // moments before the running forward
  Timeline last_;
  std::vector<ActivationCopies> last_copies_;
  bool has_last_ = false;
};

// When each array is used next, by the last complete timeline.
class NextUse {
 public:
  static constexpr int64_t kNever = INT64_MAX;

  NextUse() = default;
  NextUse(const Timeline& timeline, int num_arrays);
  // First moment after `position` that reads or writes the array, or kNever.
  int64_t after(ArrayId array, int64_t position) const;
  bool empty() const { return uses_.empty(); }

 private:
  std::vector<std::vector<int64_t>> uses_;  // by array index, ascending
};

}  // namespace patrickstar
