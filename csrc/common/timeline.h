// The access sequence of one step, as observed: the input of the planner.
//
// A moment begins when a module (forward) or an operation's backward acquires parameters. It lasts until
// the next one begins. During it the listed arrays were used and the tide rose to `tide_peak_bytes`.
#pragma once

#include <cstdint>
#include <vector>

#include "common/types.h"

namespace patrickstar {

enum class AccessMode : uint8_t {
  kRead,    // the value must be on the device
  kWrite,   // a slot must be on the device; it is created at the first write
  kRetire,  // the slot is not needed on the device any more
};

struct Access {
  ArrayId array;
  AccessMode mode;
};

enum class Phase : uint8_t { kForward, kBackward };

struct Moment {
  Phase phase = Phase::kForward;
  std::vector<ArrayId> acquired;  // what the moment began with, sorted: its identity in a replay
  std::vector<Access> accesses;   // all accesses, `acquired` first
  int64_t tide_peak_bytes = 0;
};

// Activations that leave the device in a moment, or come back in it ([Note: stashed activations], engine/stash.h).
struct ActivationCopies {
  int64_t leaving_bytes = 0;  // to the host, when the moment has computed
  int64_t coming_bytes = 0;   // back, when what came before the moment has computed
  int64_t needed_bytes = 0;   // what the moment needs of those that come back, which are needed in the order they came
};

struct Timeline {
  std::vector<Moment> moments;
  // By phase (a forward or a backward), in their order: how many moments the step had when it was over. Empty: not
  // known.
  std::vector<int64_t> phase_ends;
};

}  // namespace patrickstar
