// When the update of each chunk may start: the rule of the engine, and of a plan that is made without one. Pure
// functions of sizes.
#pragma once

#include <cstdint>

#include "chunk/layout.h"
#include "common/dtype.h"
#include "common/types.h"
#include "plan/host_demand.h"
#include "plan/simulator.h"

namespace patrickstar {

// When updates on the host or through the disk may start at the earliest.
enum class UpdateStart : uint8_t {
  kAfterNorm,    // when the norm of all gradients is known
  kSpeculative,  // in backward, as far as there is memory for new values; undone where the step is another one
  kCommitted,    // in backward and for good, as an optimizer in backward does
};

// The scale of gradients that speculative updates are made for.
enum class ExpectedScale : uint8_t {
  kExact,    // one number: clipping has not acted of late
  kBetween,  // one of several, since it has: values in 16 bits that are the same for all ([Note: settled values])
};

// A chunk before a step.
struct UpdatedChunk {
  bool trainable = true;
  DType dtype = DType::kFloat32;  // compute dtype
  Tier states = Tier::kHost;      // where its optimizer states are
  Ahead ahead = Ahead::kNothing;  // how much of a speculative update there is memory for
};

UpdateAt update_at(const UpdatedChunk& chunk, UpdateStart start, ExpectedScale scale);

// The simulator's view of a layout: ranks that share a chunk, and by chunk the elements of an update and its bytes
// on the disk.
void describe_updates(const Layout& layout, StepShape& shape);

}  // namespace patrickstar
