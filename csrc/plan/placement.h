// Which chunks have their optimizer states on the device, and the planner's problem that follows. Pure functions of
// sizes and of the timeline, so that a plan can be made without a device.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "chunk/layout.h"
#include "common/types.h"
#include "plan/planner.h"

namespace patrickstar {

// Bytes of a chunk's optimizer states, and of everything it takes where its states are (states plus the compute
// copy or the gradient in its place).
int64_t optimizer_bytes(const ChunkSpec& chunk);
int64_t home_bytes(const ChunkSpec& chunk);
// What its states take where they are placed, whatever becomes of gradients: the compute value as well where it is a
// part of the master, and of a quantised chunk its codes and scales.
int64_t placed_bytes(const ChunkSpec& chunk);

// How many backwards a step is known to have.
enum class Backwards : uint8_t {
  kOne,      // or not known
  kSeveral,  // whose gradients accumulate
};

// What accumulation takes beside a chunk's home, where that is: sums of gradients in float32, and a gradient beside the
// parameters, whose place it cannot take while another forward is to come, in whole pages. None for a frozen chunk.
int64_t accumulation_bytes(const Layout& layout, ChunkId chunk);
// Both: all that a chunk takes where it is at home.
int64_t held_bytes(const Layout& layout, ChunkId chunk, Backwards backwards);

// Of a device limit, what PyTorch's allocator is taken to need on CUDA to round and to fragment, until it was measured
// ([Note: fragments], backend/cuda_pressure.cpp).
constexpr double kCudaSlackRatio = 0.04;
// The same where its segments are fixed, which is on small limits: three of 20 MiB that are not full, at most this
// share.
constexpr int64_t kFixedSegmentSlack = int64_t{60} << 20;
constexpr double kFixedSegmentSlackRatio = 0.15;

// What the host keeps free beside its chunks: for a gradient whose parameters are still of use, and pages that are not
// full. Where gradients never take their parameters' place, for two: one that comes down while another is applied.
int64_t spare_bytes(const Layout& layout);

// What a chunk's optimizer states take on a disk, and what is left of it on the host where they are there: its value or
// its gradient, both where the value is a part of the master ([Note: states on the disk], engine/disk_states.h).
int64_t disk_bytes(const ChunkSpec& chunk);
int64_t bytes_beside_disk(const Layout& layout, ChunkId chunk, Backwards backwards);

// Host memory through which the states of chunks on the disk pass: sets of blocks, each for any of these chunks.
struct DiskSets {
  int count = 0;
  std::array<int64_t, 3> block_bytes{};  // of each set, for each of optimizer_arrays(); 0: no chunk has such a state

  // For this chunk as well.
  void serve(const ChunkSpec& chunk);
  // Of all of them, in whole pages.
  int64_t num_bytes() const;
};
// One is read, one is updated, one is written.
constexpr int kNumDiskSets = 3;
DiskSets disk_sets(const Layout& layout, const std::vector<Tier>& homes);

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
// enough. One that `device_room_bytes` has no room
// for is passed over. More bytes on the host than its limit: all together are too small.
InitialPlacement initial_placement(const Layout& layout, int64_t host_limit_bytes, int64_t device_room_bytes,
                                   Backwards backwards, int64_t disk_limit_bytes = 0);

// Of the chunks on the disk, those that come home to the host when it has `room_bytes` more: the first ones, which the
// next forward waits for.
std::vector<ChunkId> home_from_disk(const Layout& layout, const std::vector<Tier>& homes, int64_t room_bytes);

// What an update on the host takes at least to begin ahead of the step: its new compute values, or what is left open of
// them where they take the old ones' place.
int64_t least_new_bytes(const Layout& layout, ChunkId chunk);

// [Note: visits] (engine/visits.h): chunks go through the device in pieces of so many elements, so many at once.
constexpr int64_t kVisitingPiece = int64_t{1} << 24;
constexpr int kNumVisitors = 4;
constexpr int64_t kVisitorAlignment = 256;  // of each array in it
// Of the device, what one of these takes, with its value, and what all of them do; 0: no chunk has states.
int64_t visiting_piece_bytes(const Layout& layout);
int64_t visitor_bytes(const Layout& layout);

std::vector<VisitCost> visit_costs(const Layout& layout);

// How much of a device there is to plan with.
struct DeviceBudget {
  int64_t limit_bytes = INT64_MAX;  // for everything, without what the allocator's rounding needs
  bool follows_tide = false;        // Backend::follows_tide
  bool prefetches_far = true;       // where transfers take time that compute can hide
  double margin_use_ratio = 1.0;    // of num_margin_chunks
  bool keeps_gradients = true;      // on the device until the step, where a chunk's states are there
  Backwards backwards = Backwards::kOne;
  // Of one rank: of gradients that wait, what lies in the tide ([Note: gradients in the tide]).
  int64_t gradient_tide_bytes = 0;
  // For chunks on the host and the new compute values of those that are updated ahead of the step; unlimited where none
  // is.
  int64_t host_limit_bytes = INT64_MAX;
  // What homes leave of the host to gradients that have memory there only until their update.
  int64_t gradient_room_bytes = INT64_MAX;
};

// Of these: what chunks with these homes leave of so much host memory; unlimited where all gradients have a place.
int64_t gradient_room_bytes(const Layout& layout, const std::vector<Tier>& homes, int64_t host_limit_bytes);

// Of host memory, what updates ahead of the step leave to gradients that come down: a few chunks' of the largest ones.
constexpr int kNumReservedGradients = 4;
int64_t reserved_gradient_bytes(const Layout& layout);

// Gradients of chunks whose states are on the device wait there for the norm, in the place of parameters that nobody
// needs any more. Of those of a step like `step`, what the device has no room for beside what it keeps for prefetches,
// whatever else leaves it: they wait on the host, where updates ahead of the step must leave them room. None of several
// ranks, which reckon with it.
int64_t leaving_gradient_bytes(const Layout& layout, const Timeline& step, const std::vector<uint8_t>& states_on_device,
                               const DeviceBudget& budget);

// After the tide is known: how many chunks (from the first on) fit into the margin that is left when all compute
// copies are resident at the highest tide (a gradient takes its parameters' place), less what slots of several sizes
// waste where memory does not follow the tide, times `margin_use_ratio` (the first PatrickStar's rule). Where the
// host then has no room to update the others ahead of the step, more of them, until it has for four fifths: each
// chunk that leaves the host makes room there for the new compute values of several others. That leaves room on the
// device for fewer compute copies, but no less than are prefetched: to fetch a value again takes less time than to
// wait for the norm.
int num_margin_chunks(const Layout& layout, const Timeline& step, const DeviceBudget& budget);

// After the tide is known: how many chunks, from the first on, have their states on the device; those of the margin,
// and where memory does not follow the tide a few at the boundary of two steps in any case.
int num_device_state_chunks(const Layout& layout, const Timeline& step, const DeviceBudget& budget);

// Of the first `count` chunks, those whose states move to the device beside the states that are there, which may be
// others': no more bytes than all of these have.
std::vector<ChunkId> chunks_that_move_in(const Layout& layout, int count, const std::vector<uint8_t>& states_on_device);

// The planner's problem for a step like `last`. `states_on_device` by chunk. It refers to `last`.
PlanProblem pose_problem(const Layout& layout, const Timeline& last, const std::vector<uint8_t>& states_on_device,
                         const DeviceBudget& budget);

int64_t highest_tide(const Timeline& timeline);

// The least device memory for payloads alone: the largest module's chunks with their gradients' chunks and what they
// are dequantised from.
// `module_params` lists the parameters each module owns.
int64_t working_set_bytes(const Layout& layout, const std::vector<std::vector<ParamId>>& module_params);

}  // namespace patrickstar
