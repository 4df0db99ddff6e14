// Records the timeline of the running step, and keeps the last complete one. Guarded by the runtime's lock.
//
//   recorder.begin_access(Phase::kForward, acquired, activation_peak_of_the_previous_access);
//   recorder.add({grad, ArrayUseMode::kWrite});
//   recorder.note_activations(activation_peak);   // of the running access
//   recorder.finish_step();          // the recording becomes last()
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "common/timeline.h"

namespace patrickstar {

class Recorder {
 public:
  // `activation_peak`: most activation memory since the previous access began.
  void begin_access(Phase phase, std::vector<ArrayId> acquired, int64_t activation_peak);
  void begin_forward() { forward_begin_ = running_.accesses.size(); }
  // Call at the end of a forward or a backward.
  void end_phase() { running_.phase_ends.push_back(static_cast<int64_t>(running_.accesses.size())); }
  // Forgets the running forward.
  void undo_forward();
  // Ignored before the first access.
  void add(ArrayUse use);
  // `position`: index of an access of the running step.
  void add_at(int64_t position, ArrayUse use);
  // Lower bound of activation memory during the running access.
  void note_activations(int64_t activation_peak);
  // Bytes of activations offloaded from now on.
  void note_absent(int64_t num_bytes);
  // Adds to the running access's activation copies.
  void note_copies(const ActivationCopies& more);
  // Counts offloaded activations as activation memory, up to `most_bytes`: later steps keep them on the device.
  void count_absent(int64_t most_bytes);
  void finish_step();
  // Replaces the last step's timeline.
  void set_last(Timeline timeline);
  // Forgets the running step, after an exception.
  void abandon_step();

  // Activation copies of last(), by access; empty if nothing was offloaded.
  const std::vector<ActivationCopies>& last_copies() const { return last_copies_; }
  const Timeline& last() const { return last_; }
  const Timeline& running() const { return running_; }
  // Index of the running access; -1 before the first.
  int64_t position() const { return static_cast<int64_t>(running_.accesses.size()) - 1; }

 private:
  Timeline running_;
  std::vector<int64_t> absent_;           // by access, at most
  std::vector<ActivationCopies> copies_;  // by access
  int64_t absent_bytes_ = 0;              // now
  size_t forward_begin_ = 0;              // number of accesses before the running forward
  Timeline last_;
  std::vector<ActivationCopies> last_copies_;
};

// Next use of each array, by the last complete timeline.
class NextUse {
 public:
  static constexpr int64_t kNever = INT64_MAX;

  NextUse() = default;
  NextUse(const Timeline& timeline, int num_arrays);
  // First access after `position` that reads or writes the array, or kNever.
  int64_t after(ArrayId array, int64_t position) const;
  bool empty() const { return uses_.empty(); }

 private:
  std::vector<std::vector<int64_t>> uses_;  // by array index, ascending
};

}  // namespace patrickstar
