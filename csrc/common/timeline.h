// The recorded accesses of one step: the input of the planner.
//
// An access of the step begins when a module (forward) or an operation's backward acquires parameters. It lasts until
// the next one begins. It lists the arrays used and the activation memory's peak.
#pragma once

#include <cstdint>
#include <vector>

#include "common/types.h"

namespace patrickstar {

enum class ArrayUseMode : uint8_t {
  kRead,      // the value must be on the device
  kWrite,     // a device buffer is needed; the first write creates it
  kFinalise,  // the device buffer is not needed any more
};

struct ArrayUse {
  ArrayId array;
  ArrayUseMode mode;
};

enum class Phase : uint8_t { kForward, kBackward };

struct Access {
  Phase phase = Phase::kForward;
  std::vector<ArrayId> acquired;  // arrays acquired at its begin, sorted: identifies it in a replay
  std::vector<ArrayUse> uses;     // all accesses, `acquired` first
  int64_t activation_peak_bytes = 0;
};

// Offloaded activations that leave the device or return to it during an access (engine/offload_store.h).
struct ActivationCopies {
  int64_t leaving_bytes = 0;  // to the host, after the access has computed
  int64_t coming_bytes = 0;   // to the device, after the previous access has computed
  int64_t needed_bytes = 0;  // of the returning bytes, those that this access needs; they are needed in order of return
};

struct Timeline {
  std::vector<Access> accesses;
  // By phase (one forward or one backward), in order: the number of accesses at its end. Empty: unknown.
  std::vector<int64_t> phase_ends;
};

}  // namespace patrickstar
