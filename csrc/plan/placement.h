// Which chunks have their optimizer states on the device once the tide is known (before: plan/homes.h), and the
// planner's problem that follows. Pure functions of sizes and of the timeline, so that a plan can be made without a
// device.
#pragma once

#include <cstdint>
#include <vector>

#include "plan/chunk_bytes.h"
#include "plan/planner.h"

namespace patrickstar {

// Of a device limit, what PyTorch's allocator is taken to need on CUDA to round and to fragment, until it was measured
// ([Note: fragments], backend/cuda_pressure.cpp).
constexpr double kCudaSlackRatio = 0.04;
// The same where its segments are fixed, which is on small limits: three of 20 MiB that are not full, at most this
// share.
constexpr int64_t kFixedSegmentSlack = int64_t{60} << 20;
constexpr double kFixedSegmentSlackRatio = 0.15;

// How much of a device there is to plan with.
struct DeviceBudget {
  int64_t limit_bytes = INT64_MAX;  // for everything, without what the allocator's rounding needs
  bool follows_tide = false;        // Backend::follows_tide
  bool prefetches_far = true;       // where transfers take time that compute can hide
  double margin_use_ratio = 1.0;    // of what num_device_state_chunks() fills
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

// Gradients of chunks whose states are on the device wait there for the norm, in the place of parameters that nobody
// needs any more. Of those of a step like `step`, what the device has no room for beside what it keeps for prefetches,
// whatever else leaves it: they wait on the host, where updates ahead of the step must leave them room. None of several
// ranks, which reckon with it.
int64_t leaving_gradient_bytes(const Layout& layout, const Timeline& step, const std::vector<uint8_t>& states_on_device,
                               const DeviceBudget& budget);

// After the tide is known: how many chunks (from the first on) have their states on the device. They fit into the
// margin that is left when all compute copies are resident at the highest tide (a gradient takes its parameters'
// place), less what slots of several sizes waste where memory does not follow the tide, times `margin_use_ratio` (the
// first PatrickStar's rule). Where the host then has no room to update the others ahead of the step, more of them,
// until it has for four fifths: each chunk that leaves the host makes room there for the new compute values of several
// others. That leaves room on the device for fewer compute copies, but no less than are prefetched: to fetch a value
// again takes less time than to wait for the norm. Where memory does not follow the tide, so do a few at the boundary
// of two steps.
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
