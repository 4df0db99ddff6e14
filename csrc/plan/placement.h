// Which chunks keep optimizer states on the device once activation memory is known (before that: plan/resting_tiers.h),
// and the resulting problem for the planner. Pure functions of sizes and the timeline, so plans need no device.
#pragma once

#include <cstdint>
#include <vector>

#include "plan/chunk_bytes.h"
#include "plan/planner.h"

namespace patrickstar {

// Share of a device limit that PyTorch's CUDA allocator needs for rounding and fragmentation. Not measured by itself.
constexpr double kCudaSlackRatio = 0.04;
// The same for small limits, where segments are fixed (no expandable segments): three segments of 20 MiB that are not
// full, at most this share of the limit.
constexpr int64_t kFixedSegmentSlack = int64_t{60} << 20;
constexpr double kFixedSegmentSlackRatio = 0.15;

struct DeviceBudget {
  int64_t limit_bytes = INT64_MAX;   // for everything, the allocator's rounding excluded
  bool follows_activations = false;  // Backend::follows_activations
  bool prefetches_far = true;        // transfers take time that compute can hide
  double margin_use_ratio = 1.0;     // share of num_device_state_chunks()'s headroom
  bool keeps_gradients = true;       // gradients wait on the device for the step if their chunk's states are there
  Backwards backwards = Backwards::kOne;
  // One rank: bytes of waiting gradients that lie in activation memory ([Note: gradients in activation memory]).
  int64_t gradient_activation_bytes = 0;
  // For host chunks and for new compute values of speculative updates; unlimited if there are none.
  int64_t host_limit_bytes = INT64_MAX;
  // Host memory for gradients without a fixed place, as resting_tiers.h has it.
  int64_t gradient_room_bytes = INT64_MAX;
};

// Bytes of gradients that do not fit on the device during a step like `step`. Such gradients, of chunks with states on
// the device, wait for the norm on the host, and speculative updates must leave them room. Room for prefetches is kept
// free on the device. 0 with several ranks, whose placement counts gradients already.
int64_t leaving_gradient_bytes(const Layout& layout, const Timeline& step, const std::vector<uint8_t>& states_on_device,
                               const DeviceBudget& budget);

// Number of chunks, from the first on, with states on the device. Their states fit the headroom:
//
//   (limit - peak activation memory - compute copies - gradients in flight - buffer waste) * margin_use_ratio
//
// A gradient takes its parameters' place. Buffer waste counts where buffers do not follow activation memory.
//
// More chunks are chosen while fewer than four fifths of the host's updates can start before the norm. Each chunk that
// leaves the host makes room there for several others' new compute values. Fewer compute copies then stay on the
// device, but at least as many as are prefetched; a second fetch costs less than waiting for the norm. If no number
// reaches four fifths, states take the room that waiting gradients leave. Where buffers do not follow activation
// memory, up to kBoundaryChunks chunks are chosen in any case.
int num_device_state_chunks(const Layout& layout, const Timeline& step, const DeviceBudget& budget);

// Chunks among the first `count` that move to the device. Their bytes and those of states already there, perhaps of
// other chunks, do not exceed the first `count` chunks' bytes.
std::vector<ChunkId> chunks_that_move_in(const Layout& layout, int count, const std::vector<uint8_t>& states_on_device);

// The planner's problem for a step like `last`, which must outlive it. `states_on_device` is by chunk.
PlanProblem pose_problem(const Layout& layout, const Timeline& last, const std::vector<uint8_t>& states_on_device,
                         const DeviceBudget& budget);

int64_t highest_activation_memory(const Timeline& timeline);

// Least device memory for chunk buffers: the chunks of the largest module, its largest gradient chunk, reduce-scatter
// buffers, and the codes of a quantised chunk. `module_params`: the parameters that each module owns.
int64_t working_set_bytes(const Layout& layout, const std::vector<std::vector<ParamId>>& module_params);

}  // namespace patrickstar
