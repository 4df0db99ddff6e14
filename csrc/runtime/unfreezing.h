// Chunks that were frozen get optimizer states: what a user who unfreezes layers between two steps sets going.
//
//   make_states(chunks)      master, momentum and variance of all of them, or of none
//   discard_states(chunks)   or not: another rank has failed
//   train(params)            from now on they are trained
//
// A chunk's parameters share its arrays, so all of a chunk get states; those that stay frozen get no gradient, and are
// left alone as any parameter without one. What was learned of steps is forgotten, since the next one goes otherwise.
//
// Owned by Runtime, guarded by its lock.
#pragma once

#include <vector>

#include "runtime/chunk_values.h"
#include "runtime/gradient_flow.h"
#include "runtime/optimizer_step.h"
#include "runtime/pager.h"
#include "runtime/residency.h"
#include "runtime/step_planner.h"

namespace patrickstar {

class Unfreezing {
 public:
  // `module_params` lists the parameters that each module owns; `device_limit_bytes` bounds everything on the device.
  Unfreezing(Core core, Pager& pager, ChunkValues& values, Residency& residency, GradientFlow& gradients,
             OptimizerStep& step, StepPlanner& planner, std::vector<std::vector<ParamId>> module_params,
             int64_t device_limit_bytes);

  // Of frozen chunks: the master is the compute value, the moments are zeros. Throws MemoryBudgetError when a budget does
  // not suffice; nothing is changed then.
  void make_states(const std::vector<ChunkId>& chunks);
  // Undoes that.
  void discard_states(const std::vector<ChunkId>& chunks);
  // Parameters that were not trained, in chunks that have states. Between two forwards.
  void train(const std::vector<ParamId>& params);

 private:
  const Layout& layout() const { return core_.store.layout(); }
  void check_device(const std::vector<ChunkId>& chunks) const;
  void check_host(const std::vector<ChunkId>& chunks);
  int64_t free_host_bytes() const;
  void make_states_of(ChunkId chunk);

  Core core_;
  Pager& pager_;
  ChunkValues& values_;
  Residency& residency_;
  GradientFlow& gradients_;
  OptimizerStep& step_;
  StepPlanner& planner_;
  std::vector<std::vector<ParamId>> module_params_;
  int64_t device_limit_bytes_;
};

}  // namespace patrickstar
