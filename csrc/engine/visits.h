// Updates that the device makes of chunks that are at home on the host.
//
// [Note: visits] The host's cores may take longer for their updates than the device for its step, while the link has
// time. So some of these chunks visit the device: their states go up, are updated there beside whatever the device
// computes, and come down into their places. The same inputs give the same bits on either side (optim/kernels.h), so
// results do not depend on who makes an update; which chunks visit is chosen with the plan (plan/plan_choice.h).
//
// A visit is launched in backward, where updates are committed: the gradient is on the device then, and so is a value
// that backward has just used, which need not go up again; whatever takes their memory waits there for the visit. A
// chunk goes through in pieces of kVisitingPiece elements; kNumVisitors of them are on the device at once: one goes up
// while another is updated and a third comes down. Behind the norm, visits were built and measured as well: beside the
// uploads of the next forward they gained nothing (docs/design.md).
//
//   if (visits.take_room()) events = visits.update(visit);
//   record.host_ready = events.down;   // whoever reads the block waits for it
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

// One chunk's update.
struct Visit {
  ChunkId chunk = -1;
  std::vector<optim::UpdateJob> jobs;  // in host memory, but for the gradient
  const void* grad = nullptr;          // the chunk's, as in the jobs: on the device
  void* param = nullptr;               // in host memory, as in the jobs
  const void* value = nullptr;         // the same bits on the device, if it has them
  std::vector<Event> after;            // what goes up may do so then
  Event grad_ready;
  Event value_ready;
};

struct VisitEvents {
  Event used;  // nothing reads the gradient or the value on the device any more
  Event down;  // everything is in host memory
};

// Of one array, or of its scales, what one piece has.
struct VisitingPart {
  char* home;
  char* place;  // on the device
  int64_t num_bytes;
  bool goes_up;
  bool comes_down;
  const char* source;  // on the device: what it has there already; null: nothing
};

class Visits {
 public:
  explicit Visits(Pager& pager) : pager_(pager), memory_(pager.memory()) {}

  // Elements of a piece, whole kStateBlocks.
  void set_piece_numel(int64_t numel) { piece_numel_ = numel; }
  // Device memory for visits, unless it is there. False: what is of use would have to leave for it.
  bool take_room();
  void leave_room();
  // Enqueues all of it. There must be room.
  VisitEvents update(const Visit& visit);

 private:
  std::vector<VisitingPart> parts_of(const Visit& visit, int64_t first, int64_t last, char* place) const;
  void update_piece(const Visit& visit, int64_t first, int64_t last);

  Pager& pager_;
  ChunkMemory& memory_;
  int64_t piece_numel_ = kVisitingPiece;
  std::array<Slot, kNumVisitors> slots_;
  size_t next_ = 0;  // of these, the one that was used longest ago
};

}  // namespace patrickstar
