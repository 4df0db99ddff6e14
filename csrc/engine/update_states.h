// State of each chunk's update in a step, as one value with a table of transitions.
//
//   kIdle          none has begun
//   kAhead         it runs before the norm is known, and can be undone ([Note: exact speculation], speculation.h)
//   kBegun         it cannot be undone, and is not launched yet
//   kStatesBehind  the new value is made, its states are not ([Note: parameters first], engine/update_jobs.h)
//   kMade          made, or on its way to be
//
// [Note: all or nothing] What an update needs (memory, places, tasks) is there before it begins, and what follows it
// does not throw. So when a step fails, each chunk is updated or as it was, and applying the step again finishes it.
// Where a launch itself fails its chunk stays kBegun, and only a checkpoint helps. Guarded by the engine's lock.
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
  // For good, by the step itself or in backward ([Note: committed updates], engine/updates.h).
  bool is_made(ChunkId chunk) const { return is(chunk, UpdateState::kMade) || is(chunk, UpdateState::kStatesBehind); }
  int num_made() const { return num_made_; }

  // Throws StateError where the table has no such transition.
  void move(ChunkId chunk, UpdateState to);
  // The step is over, or given up. What runs ahead goes on, until it is undone.
  void end_step();

 private:
  std::vector<UpdateState> states_;  // by chunk
  int num_made_ = 0;
};

}  // namespace patrickstar
