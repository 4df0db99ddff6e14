// Chunks that were frozen get optimizer states: what a user who unfreezes layers between two steps sets going.
//
//   make_states(chunks)      master, momentum and variance of all of them, or of none
//   discard_states(chunks)   or not: another rank has failed
//   train(params)            from now on they are trained
//
// A chunk's parameters share its arrays, so all of a chunk get states; those that stay frozen get no gradient, and are
// left alone as any parameter without one. What was learned of steps is forgotten, since the next one goes otherwise.
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
  // `module_params` lists the parameters that each module owns.
  Unfreezing(Pager& pager, ChunkValues& values, Residency& residency, const MatrixUpdates& matrices,
             GradientFlow& gradients, Updates& updates, StepPlanner& planner,
             std::vector<std::vector<ParamId>> module_params);

  // Of frozen chunks: the master is the compute value, the moments are zeros. Throws MemoryBudgetError when a budget
  // does not suffice; nothing is changed then.
  void make_states(const std::vector<ChunkId>& chunks);
  // Undoes that.
  void discard_states(const std::vector<ChunkId>& chunks);
  // Parameters that were not trained, in chunks that have states. Between two forwards.
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
