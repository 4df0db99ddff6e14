// Updates on the host that begin before the step, in a way that can be taken back ([Note: exact speculation],
// engine/speculation.h), and what is left to do for them in the step.
//
//   start(chunk)                   its gradient is complete: its new values are computed, into memory of their own or
//                                  in place, as far as there is memory for them
//   begin_step(groups, grad_scale) whether the step is what was expected; else what was started is dropped
//   take_over(chunk, ...)          the new values become the chunk's
//   make_pass(), add(pass), end_step()
//                                  states behind new parameters ([Note: parameters first], engine/update_jobs.h)
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

// The second pass of chunks whose new parameters are computed, or being so.
struct StatesPass {
  std::vector<ChunkId> chunks;
  std::shared_ptr<HostUpdate> update;
  std::vector<HostBlock> gradients;  // that end with it, but those that have a place of their own
};

class EarlyUpdates {
 public:
  EarlyUpdates(Pager& pager, const Gradients& gradients, HostUpdates& host_updates, Speculation& speculation,
               UpdateJobs& jobs, UpdateArrays& arrays, UpdateStates& states);

  // The chunk's gradient is complete, or on its way to the host: its update starts if it has all that it takes. In one
  // pass where `passes` and memory allow it.
  void start(ChunkId chunk, Passes passes);
  // Old values that new ones have taken the place of are to be read, and are written again: of these parameters'
  // chunks, of one, or of all.
  void restore_values(const std::vector<ParamId>& params);
  void restore_values(ChunkId chunk);
  void restore_values();
  void cancel_all();

  // Drops what was started for nothing, which may have to be waited for. Whether nothing was.
  bool begin_step(const std::vector<GroupOptions>& groups, double grad_scale);
  bool has(ChunkId chunk) const { return speculation_.has(chunk); }
  // The chunk's new values become its values. Returns in how many passes. Where it throws they are what was started, or
  // nothing is.
  Passes take_over(ChunkId chunk, const std::vector<GroupOptions>& groups, float grad_scale);
  // What was begun for another factor, or not at all: its values in place, to be taken over, and its states behind.
  // False: it has not all that it takes.
  bool start_after_all(ChunkId chunk, const std::vector<GroupOptions>& groups, float grad_scale);
  // One that updates the states of these jobs, once what its `after` gets besides is over. All that it takes is there:
  // add() does not throw.
  StatesPass make_pass(const std::vector<ChunkId>& chunks, const std::vector<optim::UpdateJob>& jobs);
  void add(StatesPass pass) { states_passes_.push_back(std::move(pass)); }
  // New parameters are nothing without new states, whatever else has failed. Where it throws the rest is kept.
  void submit_states_passes();
  void end_step();
  // The step is given up, with all values.
  void drop_states_passes();

 private:
  // [Note: values in place]: of a chunk whose gradient is on the host. False: it has not all that it takes.
  bool put_values(ChunkId chunk, const std::vector<GroupOptions>& groups, const ScaleBounds& scales);
  void take_over_states(ChunkId chunk);
  // The states behind the new parameters, of which those that are open are made now.
  void take_over_params(ChunkId chunk, const std::vector<GroupOptions>& groups, float grad_scale);
  void take_over_in_place(ChunkId chunk, const std::vector<GroupOptions>& groups, float grad_scale);
  void take_over_param(ChunkId chunk, HostBlock block, const Event& done);

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
  int num_put_ = 0;                        // in place, of the running step
};

}  // namespace patrickstar
