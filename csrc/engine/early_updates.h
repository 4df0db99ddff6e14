// Speculative updates on the host, which begin before the step and can be rolled back ([Note: exact speculation],
// engine/speculation.h), and their completion in the step.
//
//   start(chunk)                   its gradient is complete: computes its new values, in place or into separate
//                                  memory, if there is enough
//   begin_step(groups, grad_scale) true if the step is the expected one; otherwise speculative updates are rolled back
//   take_over(chunk, ...)          makes the new values the chunk's values
//   make_pass(), add(pass), end_step()
//                                  phase two of two-phase updates ([Note: two-phase updates], engine/update_jobs.h)
//
// Guarded by the engine's lock.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "engine/gradients.h"
#include "engine/pager.h"
#include "engine/speculation.h"
#include "engine/update_arrays.h"
#include "engine/update_jobs.h"
#include "engine/update_states.h"

namespace patrickstar {

// Phase two of chunks whose new parameters are computed or being computed.
struct StatesPass {
  std::vector<ChunkId> chunks;
  std::shared_ptr<HostUpdate> update;
  std::vector<HostBuffer> gradients;  // freed after it, unless they have reserved memory
};

class EarlyUpdates {
 public:
  EarlyUpdates(Pager& pager, const Gradients& gradients, HostUpdates& host_updates, Speculation& speculation,
               UpdateJobs& jobs, UpdateArrays& arrays, UpdateStates& states);

  // Starts the chunk's update if all its inputs and memory are available. The gradient must be complete, or on its way
  // to the host. One-phase if `passes` and memory allow it.
  void start(ChunkId chunk, Passes passes);
  // Writes the old values again where in-place speculative updates replaced them, before they are read: of the chunks
  // of these parameters, of one chunk, or of all.
  void restore_values(const std::vector<ParamId>& params);
  void restore_values(ChunkId chunk);
  void restore_values();
  void cancel_all();

  // If the step is not the expected one, rolls back all speculative updates, waiting for running ones. True if some
  // exist and are kept.
  bool begin_step(const std::vector<GroupOptions>& groups, double grad_scale);
  bool has(ChunkId chunk) const { return speculation_.has(chunk); }
  // Returns the number of phases. If it throws, the chunk keeps either its speculative values or its old ones.
  Passes take_over(ChunkId chunk, const std::vector<GroupOptions>& groups, float grad_scale);
  // Starts an in-place update after the norm, to be followed by take_over(). False if an input or memory is missing.
  bool start_after_all(ChunkId chunk, const std::vector<GroupOptions>& groups, float grad_scale);
  // Phase two of `chunks`, which updates the states of these jobs after the events that the caller adds to `after`.
  // Allocates everything, so that add() does not throw.
  StatesPass make_pass(const std::vector<ChunkId>& chunks, const std::vector<optim::UpdateJob>& jobs);
  void add(StatesPass pass) { states_passes_.push_back(std::move(pass)); }
  // Must run even if other updates failed, since new parameters need new states. If it throws, the rest is kept.
  void submit_states_passes();
  void end_step();
  // The step is given up, and all values with it.
  void drop_states_passes();

 private:
  // In-place update of a chunk whose gradient is on the host (optim/kernels.h). False if an input or memory is missing.
  bool put_values(ChunkId chunk, const std::vector<GroupOptions>& groups, const ScaleBounds& scales);
  void take_over_states(ChunkId chunk);
  // Enqueues the scale-dependent values, and phase two behind them.
  void take_over_params(ChunkId chunk, const std::vector<GroupOptions>& groups, float grad_scale);
  void take_over_in_place(ChunkId chunk, const std::vector<GroupOptions>& groups, float grad_scale);
  void take_over_param(ChunkId chunk, HostBuffer block, const Event& done);

  Pager& pager_;
  ChunkMemory& memory_;
  ChunkStore& store_;
  const Gradients& gradients_;
  DiskStates& disk_;
  HostUpdates& host_updates_;
  Speculation& speculation_;
  UpdateJobs& jobs_;
  UpdateArrays& arrays_;
  UpdateStates& states_;
  std::vector<StatesPass> states_passes_;  // of the step that is being applied
  int num_put_ = 0;                        // in-place updates of the running step
};

}  // namespace patrickstar
