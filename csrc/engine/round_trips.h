// GPU round-trip updates: the device updates chunks whose states rest on the host.
//
// The host may need longer for its updates than the device for its step, while the link is free. So
// states of some chunks go up, are updated on the device beside compute, and come down again. Both sides give the same
// bits for the same inputs (optim/kernels.h), so results do not depend on the choice. The plan makes the choice
// (plan/plan_choice.h).
//
// A round trip starts in backward, with optimizer-in-backward. The gradient is on the device then, and often the value
// that backward has just used, which need not go up. Other uses of their memory wait for the round trip. A chunk passes
// in pieces of kRoundTripPiece elements, kNumRoundTripBuffers at once: one goes up, one is updated and one comes down.
//
//   if (round_trips.take_room()) events = round_trips.update(round trip);
//   record.host_ready = events.down;   // readers of the host buffer wait for it
//
// Guarded by the engine's lock.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "engine/pager.h"
#include "optim/compute.h"
#include "plan/chunk_bytes.h"

namespace patrickstar {

struct RoundTrip {
  ChunkId chunk = -1;
  std::vector<optim::UpdateJob> jobs;  // in host memory, except for the gradient
  const void* grad = nullptr;          // the chunk's, as in the jobs: on the device
  void* param = nullptr;               // in host memory, as in the jobs
  const void* value = nullptr;         // the value's copy on the device, or null
  std::vector<Event> after;            // uploads wait for these
  Event grad_ready;
  Event value_ready;
};

struct RoundTripEvents {
  Event used;  // completes the reads of gradient and value on the device
  Event down;  // completes everything in host memory
};

// One piece's part of an array, or of its scales.
struct RoundTripPart {
  char* at_rest;  // in host memory
  char* place;    // on the device
  int64_t num_bytes;
  bool goes_up;
  bool comes_down;
  const char* source;  // an existing copy on the device, or null
};

class RoundTrips {
 public:
  explicit RoundTrips(Pager& pager) : pager_(pager), memory_(pager.memory()) {}

  // Elements of a piece, whole kStateBlocks.
  void set_piece_numel(int64_t numel) { piece_numel_ = numel; }
  // Allocates device memory for round trips. False if something useful would have to leave for it.
  bool take_room();
  void leave_room();
  // Enqueues the round trip. take_room() must have succeeded.
  RoundTripEvents update(const RoundTrip& round_trip);

 private:
  std::vector<RoundTripPart> parts_of(const RoundTrip& round_trip, int64_t first, int64_t last, char* place) const;
  void update_piece(const RoundTrip& round_trip, int64_t first, int64_t last);

  Pager& pager_;
  ChunkMemory& memory_;
  int64_t piece_numel_ = kRoundTripPiece;
  std::array<DeviceBuffer, kNumRoundTripBuffers> device_buffers_;
  size_t next_ = 0;  // index of the least recently used of device_buffers_
};

}  // namespace patrickstar
