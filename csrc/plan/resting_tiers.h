// Resting tiers of chunks before activation memory is known: host, device or disk. Pure functions of sizes.
#pragma once

#include <cstdint>
#include <vector>

#include "plan/chunk_bytes.h"

namespace patrickstar {

struct InitialPlacement {
  std::vector<Tier> resting_tiers;  // by chunk
  int64_t host_bytes = 0;
  int64_t disk_bytes = 0;
};

// Everything rests on the host unless that exceeds `host_limit_bytes`. Then:
// - First, states of the last chunks go to the disk. Chunks so large that the buffer sets would cost more are skipped.
// - Second, chunks go to the device: the first ones, or alternating where gradients do not keep host memory until the
//   step. The last chunk moved is the smallest that suffices. Chunks that exceed `device_room_bytes` are skipped.
//
// host_bytes counts spare memory and disk buffer sets. A result above host_limit_bytes means that all tiers together
// are too small.
InitialPlacement initial_placement(const Layout& layout, int64_t host_limit_bytes, int64_t device_room_bytes,
                                   Backwards backwards, int64_t disk_limit_bytes = 0);

// Disk chunks that move to the host when it gets `room_bytes` more: the first ones, since the next forward waits for
// them.
std::vector<ChunkId> chunks_leaving_disk(const Layout& layout, const std::vector<Tier>& resting_tiers,
                                         int64_t room_bytes);

// Resting tiers once activation memory is known. Chunks with states on the device rest there; the first disk chunks
// move to the host as far as `host_limit_bytes` allows. Quantised chunks keep their place on the host.
std::vector<Tier> later_resting_tiers(const Layout& layout, const std::vector<Tier>& first_resting_tiers,
                                      const std::vector<uint8_t>& states_on_device, int64_t host_limit_bytes,
                                      Backwards backwards);

// True where gradients have host memory only until their update, so updates must run in backward.
bool any_gradient_passes(const Layout& layout);

// Host bytes of chunks with these resting tiers, without the buffer sets of the disk.
int64_t bytes_on_host(const Layout& layout, const std::vector<Tier>& resting_tiers, Backwards backwards);

// Host memory that these resting tiers leave to gradients without a fixed place; INT64_MAX where all have one.
int64_t gradient_room_bytes(const Layout& layout, const std::vector<Tier>& resting_tiers, int64_t host_limit_bytes);

}  // namespace patrickstar
