// State of each chunk's update in a step:
//
//   kIdle          not begun
//   kAhead         speculative: runs before the norm is known, and can be rolled back (engine/speculation.h)
//   kBegun         cannot be rolled back, and is not launched yet
//   kStatesBehind  phase one is launched, phase two is not ([Note: two-phase updates], engine/update_jobs.h)
//   kMade          launched, or complete
//
// All or nothing: an update allocates everything that it needs before it begins, and nothing after its launch throws.
// So when a step fails, each chunk is either updated or unchanged, and repeating the step finishes it. If a launch
// itself fails, its chunk stays kBegun, and only a checkpoint restores it. Guarded by the engine's lock.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "common/types.h"

namespace patrickstar {

enum class UpdateState : uint8_t { kIdle, kAhead, kBegun, kStatesBehind, kMade };

class UpdateStates {
 public:
  explicit UpdateStates(int num_chunks) : states_(static_cast<size_t>(num_chunks), UpdateState::kIdle) {}

  bool is(ChunkId chunk, UpdateState state) const { return states_[static_cast<size_t>(chunk)] == state; }
  bool any(UpdateState state) const { return std::find(states_.begin(), states_.end(), state) != states_.end(); }
  // Never rolled back; made by the step itself or by optimizer-in-backward (`UpdateStart::kCommitted`).
  bool is_made(ChunkId chunk) const { return is(chunk, UpdateState::kMade) || is(chunk, UpdateState::kStatesBehind); }
  int num_made() const { return num_made_; }

  // Throws StateError if the table has no such transition.
  void move(ChunkId chunk, UpdateState to);
  // The step ends or is given up. Speculative updates continue until they are rolled back.
  void end_step();

 private:
  std::vector<UpdateState> states_;  // by chunk
  int num_made_ = 0;
};

}  // namespace patrickstar
