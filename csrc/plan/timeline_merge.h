// Timelines of several ranks whose models took different paths in one step, as one timeline that all can follow: each
// leaves out the accesses of others (engine/plan_replay.h). Pure functions; any thread may call them.
#pragma once

#include <string>

#include "common/timeline.h"

namespace patrickstar {

// The accesses of both, each in its order; equal ones once, as many as possible (longest common subsequence).
// Activation memory is the larger. A gradient leaves the device where the later of both does. `a` alone if their phases
// differ.
Timeline merged(const Timeline& a, const Timeline& b);

std::string packed(const Timeline& timeline);
// Throws StateError for a message that is not a timeline over `num_chunks` chunks.
Timeline unpacked_timeline(const std::string& message, int num_chunks);

}  // namespace patrickstar
