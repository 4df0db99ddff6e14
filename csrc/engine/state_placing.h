// Placement of optimizer states on the device, in free memory beside activations and chunk buffers.
#pragma once

#include "engine/open_engine.h"

namespace patrickstar {

// Called before a step's updates, or where the step is skipped. States move into free device memory in the first steps,
// and when states that left the device may return. All ranks call it in the same step.
void place_before_updates(OpenEngine& open);

}  // namespace patrickstar
