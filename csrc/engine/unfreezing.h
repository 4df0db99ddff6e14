// Gives frozen chunks optimizer states, when a user unfreezes layers between two steps.
//
//   make_states(chunks)      master, momentum and variance of all of them, or of none
//   discard_states(chunks)   if another rank has failed
//   train(params)            trains them from now on
//
// The whole chunk gets states; parameters of it that stay frozen are not updated. Recorded steps and plans are
// forgotten, since the next step differs.
//
// Guarded by the engine's lock.
#pragma once

#include <vector>

#include "engine/chunk_values.h"
#include "engine/gradient_flow.h"
#include "engine/matrix_updates.h"
#include "engine/residency.h"
#include "engine/step_planner.h"
#include "engine/updates.h"

namespace patrickstar {

class Unfreezing {
 public:
  // `module_params`: the parameters that each module owns.
  Unfreezing(Pager& pager, ChunkValues& values, Residency& residency, const MatrixUpdates& matrices,
             GradientFlow& gradients, Updates& updates, StepPlanner& planner,
             std::vector<std::vector<ParamId>> module_params);

  // Sets the master to the compute value and the other states to zeros. Throws MemoryBudgetError if a budget does not
  // suffice; nothing has changed then.
  void make_states(const std::vector<ChunkId>& chunks);
  void discard_states(const std::vector<ChunkId>& chunks);
  // `params`: untrained parameters in chunks that have states. Call between two forwards.
  void train(const std::vector<ParamId>& params);

 private:
  const Layout& layout() const { return memory_.layout(); }
  // `then`: the layout with `chunks` trained.
  void check_device(const Layout& then) const;
  void check_host(const Layout& then, const std::vector<ChunkId>& chunks);
  int64_t free_host_bytes() const;
  void make_states_of(ChunkId chunk);

  Pager& pager_;
  ChunkMemory& memory_;
  ChunkValues& values_;
  Residency& residency_;
  const MatrixUpdates& matrices_;
  GradientFlow& gradients_;
  Updates& updates_;
  StepPlanner& planner_;
  std::vector<std::vector<ParamId>> module_params_;
};

}  // namespace patrickstar
