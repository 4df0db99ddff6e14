// What an engine takes of host memory at its peak: homes, updates ahead of the step, gradients that accumulate. Pure
// functions of sizes.
//
// [Note: the host's peak] Host memory is mapped when it is first needed and mapped memory is used again, so the peak is
// a sum: places for all homes, which are there from the beginning also where states or frozen values then move to the
// device; new values of updates ahead of the step, as far as the memory that these have left does not serve; gradients
// and their sums where several backwards make a step; and gradients on their way. It is what an undisturbed run comes
// to: chunks that leave the device under pressure come on top, within the limit.
#pragma once

#include <cstdint>
#include <vector>

#include "chunk/layout.h"
#include "common/types.h"
#include "plan/homes.h"

namespace patrickstar {

// How much of a chunk's update is made ahead of the step.
enum class Ahead : uint8_t { kNothing, kParam, kEverything };

// What a chunk's new values take; nothing for one whose states are not on the host.
struct NewBytes {
  std::vector<int64_t> states;  // of ChunkSpec::state_kinds(); none where the old ones are overwritten
  int64_t param = 0;            // or what is left open of values in place
};
NewBytes new_bytes(const Layout& layout, ChunkId chunk);
// By chunk; `states`: where its optimizer states are.
std::vector<NewBytes> new_bytes_on_host(const Layout& layout, const std::vector<Tier>& states);

// Host memory for new values.
struct AheadRoom {
  int64_t num_bytes = 0;  // all of it
  int64_t spare = 0;      // of that, mapped or to be mapped in any case
};

struct AheadChoice {
  std::vector<Ahead> chosen;    // by chunk
  std::vector<int64_t> blocks;  // bytes of what is to be mapped for them
};

// The chunks whose updates are made ahead of the step, in the order of the next forward: new parameters of as many as
// possible, then new states. `sizes` by chunk.
AheadChoice choose_ahead(const std::vector<NewBytes>& sizes, AheadRoom room);

// Whether there are updates ahead of the step that take memory.
enum class NewValuesAhead : uint8_t { kNever, kWhereThereIsRoom };

// The most that the host will have mapped. `first_homes`: before the tide was known; `states_on_device`: now, by chunk.
int64_t host_peak_bytes(const Layout& layout, const std::vector<Tier>& first_homes,
                        const std::vector<uint8_t>& states_on_device, int64_t host_limit_bytes, NewValuesAhead ahead,
                        Backwards backwards);

}  // namespace patrickstar
