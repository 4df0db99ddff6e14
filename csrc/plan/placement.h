// Which chunks have their optimizer states on the device, and the planner's problem that follows. Pure functions of
// sizes and of the timeline, so that a plan can be made without a device.
#pragma once

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

// Of a device limit, what optimizer states may take before the tide is known.
constexpr double kInitialDeviceShare = 0.9;
// Of a device limit, what PyTorch's allocator needs on CUDA to round and to fragment.
constexpr double kCudaSlackRatio = 0.04;
// The same where its segments are fixed, which is on small limits: three of 20 MiB that are not full, at most this share.
constexpr int64_t kFixedSegmentSlack = int64_t{60} << 20;
constexpr double kFixedSegmentSlackRatio = 0.15;

// Before the tide is known: the host first, then the device as long as `device_room_bytes` lasts; with an unlimited
// device, all of it there. Throws MemoryBudgetError when both together are too small. By chunk.
std::vector<Tier> initial_placement(const Layout& layout, int64_t host_limit_bytes, int64_t device_room_bytes,
                                    bool device_unlimited);

// How much of a device there is to plan with.
struct DeviceBudget {
  int64_t limit_bytes = INT64_MAX;  // for everything, without what the allocator's rounding needs
  bool follows_tide = false;        // Backend::follows_tide
  bool prefetches_far = true;       // where transfers take time that compute can hide
  double margin_use_ratio = 0.95;   // of num_margin_chunks
  bool keeps_gradients = true;      // on the device until the step, where a chunk's states are there
};

// After the tide is known: how many chunks (from the first on) fit into the margin that is left when all compute copies
// are resident at the highest tide (a gradient takes its parameters' place), times `margin_use_ratio` (the first
// PatrickStar's rule).
int num_margin_chunks(const Layout& layout, const DeviceBudget& budget, int64_t tide_peak_bytes);

// After the tide is known: how many chunks, from the first on, have their states on the device; those of the margin, and
// where memory does not follow the tide a few at the boundary of two steps in any case.
int num_device_state_chunks(const Layout& layout, const Timeline& step, const DeviceBudget& budget);

// The planner's problem for a step like `last`. `states_on_device` by chunk. It refers to `last`.
PlanProblem pose_problem(const Layout& layout, const Timeline& last, const std::vector<uint8_t>& states_on_device,
                         const DeviceBudget& budget);

int64_t highest_tide(const Timeline& timeline);

// The least device memory for payloads alone: the largest module's chunks with their gradients' chunks.
// `module_params` lists the parameters each module owns.
int64_t working_set_bytes(const Layout& layout, const std::vector<std::vector<ParamId>>& module_params);

}  // namespace patrickstar
