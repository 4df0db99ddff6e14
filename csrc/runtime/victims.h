// The order in which arrays leave the device when it must make room: a pure function.
//
// Farthest next use first (Belady), of two alike the one that was used longest ago. An array whose only value is on the
// device counts as used at the step's end at the latest, where the optimizer reads it. Optimizer states live on the device
// by placement, and are the last to go.
#pragma once

#include <cstdint>
#include <vector>

#include "common/types.h"

namespace patrickstar {

struct Victim {
  ArrayId id;
  int64_t next_use = 0;   // moments from now
  uint64_t last_use = 0;  // by the pager's clock
  bool dirty = false;     // its value is nowhere else, and cannot be derived
};

bool is_optimizer_state(ArrayKind kind);

// The first to leave first; the step has `num_moments`.
void sort_victims(std::vector<Victim>& victims, int64_t num_moments);

}  // namespace patrickstar
