// Peak host memory of an engine. Pure functions of sizes.
#pragma once

#include <cstdint>
#include <vector>

#include "chunk/layout.h"
#include "common/types.h"
#include "plan/resting_tiers.h"

namespace patrickstar {

// How much of a chunk's update is made before the norm is known.
enum class Ahead : uint8_t { kNothing, kParam, kEverything };

// Bytes of a chunk's new values; empty where its states are not on the host.
struct NewBytes {
  std::vector<int64_t> states;  // by ChunkSpec::state_kinds(); empty where updates overwrite the old states
  int64_t param = 0;            // or the log of scale-dependent values
};
NewBytes new_bytes(const Layout& layout, ChunkId chunk);
// `states`: tier of each chunk's optimizer states.
std::vector<NewBytes> new_bytes_on_host(const Layout& layout, const std::vector<Tier>& states);

struct AheadRoom {
  int64_t num_bytes = 0;  // all of it
  int64_t spare = 0;      // part of num_bytes that is mapped, or will be in any case
};

struct AheadChoice {
  std::vector<Ahead> chosen;    // by chunk
  std::vector<int64_t> blocks;  // host buffers to be mapped for new values, in bytes
};

// Chunks whose updates run before the norm, in the order of the next forward: new parameters of as many as fit, then
// new states. `sizes` is by chunk.
AheadChoice choose_ahead(const std::vector<NewBytes>& sizes, AheadRoom room);

enum class NewValuesAhead : uint8_t { kNever, kWhereThereIsRoom };

// Most host memory that will be mapped. `first_resting_tiers`: tiers before activation memory was known;
// `states_on_device`: by chunk, now. Mapped memory is reused and never shrinks, so the peak is a sum of:
// - places of all chunks that ever rested on the host, also if states or frozen values then moved to the device;
// - new values of speculative updates, beyond what moved states have freed;
// - gradients in flight, and gradients with their sums where several backwards make a step.
//
// Chunks evicted from the device under pressure come on top, within the limit.
int64_t host_peak_bytes(const Layout& layout, const std::vector<Tier>& first_resting_tiers,
                        const std::vector<uint8_t>& states_on_device, int64_t host_limit_bytes, NewValuesAhead ahead,
                        Backwards backwards);

}  // namespace patrickstar
