// Where chunks belong before the tide is known: host, device or disk. Pure functions of sizes.
#pragma once

#include <cstdint>
#include <vector>

#include "plan/chunk_bytes.h"

namespace patrickstar {

// Where each chunk belongs before the tide is known, and what that takes on the host, spare and sets included, and on
// the disk.
struct InitialPlacement {
  std::vector<Tier> homes;  // by chunk
  int64_t host_bytes = 0;
  int64_t disk_bytes = 0;
};

// On the host, but for what it takes to keep that within `host_limit_bytes`. First the states of the last ones go to
// the disk, whose room is no guess, but for large ones where all sets would be as large. Then as many of the first ones
// go to the device as it takes, or of all in turn ([Note: homes in turn]); the last of them is the least that is
// enough. One that `device_room_bytes` has no room for is passed over. More bytes on the host than its limit: all
// together are too small.
InitialPlacement initial_placement(const Layout& layout, int64_t host_limit_bytes, int64_t device_room_bytes,
                                   Backwards backwards, int64_t disk_limit_bytes = 0);

// Of the chunks on the disk, those that come home to the host when it has `room_bytes` more: the first ones, which the
// next forward waits for.
std::vector<ChunkId> home_from_disk(const Layout& layout, const std::vector<Tier>& homes, int64_t room_bytes);

// Where chunks belong once the tide is known. States on the device are at home there, and the first ones of the disk
// come to the host where others left room within `host_limit_bytes`. Quantised chunks keep their place on the host.
std::vector<Tier> later_homes(const Layout& layout, const std::vector<Tier>& first_homes,
                              const std::vector<uint8_t>& states_on_device, int64_t host_limit_bytes,
                              Backwards backwards);

// Gradients of any chunk have memory only until their update, which is therefore promised in backward.
bool any_gradient_passes(const Layout& layout);

// Bytes of the host that chunks with these homes take, without what states on the disk pass through.
int64_t bytes_on_host(const Layout& layout, const std::vector<Tier>& homes, Backwards backwards);

// What chunks with these homes leave of so much host memory to gradients that have memory there only until their
// update; unlimited where all gradients have a place.
int64_t gradient_room_bytes(const Layout& layout, const std::vector<Tier>& homes, int64_t host_limit_bytes);

}  // namespace patrickstar
