// What one chunk's update consists of: jobs for the Adam kernels, one for each range of parameters that share a group and
// a step count, and copies for parameters that have no gradient. Keeps each parameter's group and step count.
//
// A parameter without a gradient in a step is left alone: where the update writes a chunk's values over its gradients, it
// gets round(master) (a Restore); where new states are apart from the old ones, it gets the old ones (a Carry).
//
// Owned by OptimizerStep, guarded by the runtime's lock.
#pragma once

#include <cstdint>
#include <vector>

#include "runtime/gradient_flow.h"
#include "runtime/group_options.h"
#include "runtime/host_updates.h"
#include "runtime/speculation.h"

namespace patrickstar {

// Where one chunk's update happens and where its result goes.
struct UpdateTarget {
  bool on_device;
  const void* grad;
  DType grad_dtype;
  void* param;
  bool in_place;  // the result replaces the gradient in its memory
  const NewStates* apart = nullptr;
};

class UpdateJobs {
 public:
  UpdateJobs(Core core, const GradientFlow& gradients);

  void set_group(ParamId param, int group) { group_of_[static_cast<size_t>(param)] = group; }
  int64_t step_count(ParamId param) const { return step_counts_[static_cast<size_t>(param)]; }
  void set_step_count(ParamId param, int64_t count) { step_counts_[static_cast<size_t>(param)] = count; }
  // The chunk was updated.
  void count_step(ChunkId chunk);

  // `groups` by index; gradients are multiplied by `grad_scale` first.
  void add(ChunkId chunk, const UpdateTarget& target, const std::vector<GroupOptions>& groups, float grad_scale,
           std::vector<optim::AdamJob>& jobs) const;
  std::vector<Restore> restores(ChunkId chunk, const UpdateTarget& target) const;
  std::vector<Carry> carries(ChunkId chunk, const NewStates& states) const;

 private:
  Core core_;
  const GradientFlow& gradients_;
  std::vector<int> group_of_;         // by parameter
  std::vector<int64_t> step_counts_;  // by parameter
};

}  // namespace patrickstar
