// The C++ parts of an open engine. Each calls only those above it in this list. To close it, call shut_down(), then
// destroy it.
//
//   step          its state, which all others only read
//   device        shared with other engines of the process (engine/shared_device.h)
//   memory        chunks, device buffers and host buffers, and copies between them
//   disk          optimizer states that rest on the disk
//   pager         what is on the device, by plan or on demand
//   gradients     which parameters have a gradient
//   matrices      parameters that are updated as whole matrices
//   updates       of chunks, in the step or before it
//   flow          gradients, from autograd to their chunk's update
//   turns         order of collective operations with other ranks
//   tracker       parameters that operations use
//   residency     optimizer states that rest on the device
//   planner       the plan of the next step
//
// The communicators in `collectives` live until all ranks have closed (patrickstar/ranks/distributed.py). Guarded by
// the device's lock.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "engine/access_tracker.h"
#include "engine/chunk_memory.h"
#include "engine/chunk_values.h"
#include "engine/disk_states.h"
#include "engine/gradient_flow.h"
#include "engine/host_loans.h"
#include "engine/matrix_updates.h"
#include "engine/offload_store.h"
#include "engine/pager.h"
#include "engine/rank_turns.h"
#include "engine/residency.h"
#include "engine/shared_device.h"
#include "engine/step_paths.h"
#include "engine/step_planner.h"
#include "engine/step_state.h"
#include "engine/unfreezing.h"
#include "engine/updates.h"
#include "engine/value_ranges.h"
#include "engine/value_rows.h"
#include "optim/compute_format.h"
#include "optim/matrix_rule.h"
#include "trace/recorder.h"
#include "trace/trace_requests.h"

namespace patrickstar {

struct EngineOptions {
  DeviceOptions device;
  ResidencyOptions residency;
  DiskOptions disk;
  UpdateStart update_start = UpdateStart::kAfterNorm;
  // By parameter, in memory order; used by matrix_rule and compute_format.
  std::vector<std::vector<int64_t>> param_shapes;
  std::shared_ptr<const optim::MatrixRule> matrix_rule;        // null: none
  std::shared_ptr<const optim::ComputeFormat> compute_format;  // null: the chunks' dtype
  // For the error that names the least limit: from this limit on, the caller chooses larger chunks, which may need
  // ample_extra_bytes more.
  int64_t ample_limit_bytes = kUnlimited;
  int64_t ample_extra_bytes = 0;
};

enum class StatesPlacing : uint8_t {
  kFirst,       // no step has ended yet
  kOfUnfrozen,  // unfrozen chunks have states that no step has placed
  kDone,
};

// The timeline of the next step, which will differ from that of the running one.
struct ExpectedStep {
  Timeline timeline;
  std::optional<StepTimes> times;  // estimates
};

struct OpenEngine {
  // Throws MemoryBudgetError if the model cannot fit. `module_params`: the parameters that each module owns. `kept`:
  // host memory of an earlier engine, or null.
  OpenEngine(std::shared_ptr<SharedDevice> shared_device, Layout layout, std::vector<std::string> param_names,
             const std::vector<std::vector<ParamId>>& module_params, const EngineOptions& options,
             std::shared_ptr<Collectives> ranks, std::shared_ptr<KeptRegions> kept);
  OpenEngine(const OpenEngine&) = delete;
  OpenEngine& operator=(const OpenEngine&) = delete;

  // Ends running work and frees all memory; a failure does not stop the rest. Throws the first failure.
  void shut_down();

  const Layout& layout() const { return memory.layout(); }
  Backend& backend() { return device->backend(); }

  const EngineOptions options;
  const std::shared_ptr<SharedDevice> device;
  const std::shared_ptr<Collectives> collectives;
  Step step;
  ChunkMemory memory;
  TraceRequests traces;
  Recorder recorder;
  StepPaths paths;
  HostUpdates host_updates;
  HostUpdates disk_updates;
  DiskStates disk;
  UpdateStates update_states;
  Speculation speculation;
  Pager pager;
  OffloadStore offload_store;
  HostLoans host_loans;
  Gradients gradients;
  MatrixUpdates matrices;
  Updates updates;
  GradientFlow flow;
  RankTurns turns;
  AccessTracker tracker;
  ChunkValues values;
  ValueRanges ranges;
  ValueRows rows;
  Residency residency;
  StepPlanner planner;
  Unfreezing unfreezing;
  StatesPlacing placing = StatesPlacing::kFirst;
  std::optional<ExpectedStep> expected;  // until the running step ends
};

}  // namespace patrickstar
