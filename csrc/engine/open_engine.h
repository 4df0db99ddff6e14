// All that an open engine has below Python: its chunks' memory, and the parts that work on them, in the order in which
// they need each other ([Note: who calls whom], docs/design.md). Closing the engine is destroying this, after
// shut_down().
//
//   step          its state, which all others only read
//   device        shared with other engines of the process (engine/shared_device.h)
//   memory        chunks, slots and blocks, and how payloads move
//   disk          optimizer states below the host
//   pager         what is on the device, by plan or on demand
//   gradients     which there are
//   matrices      which parameters are updated as such
//   updates       of chunks, in the step or ahead of it
//   flow          from autograd's gradients to their chunk's update
//   turns         with other ranks, where no plan says whose chunk is next
//   tracker       who uses which parameter, when
//   residency     which optimizer states are on the device
//   planner       the plan of the next step
//
// What it was given of ranks (`collectives`) it uses and does not own: their communicators live until all ranks have
// closed (patrickstar/ranks/distributed.py). Guarded by the device's lock.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "engine/access_tracker.h"
#include "engine/chunk_memory.h"
#include "engine/chunk_values.h"
#include "engine/disk_states.h"
#include "engine/gradient_flow.h"
#include "engine/matrix_updates.h"
#include "engine/pager.h"
#include "engine/rank_turns.h"
#include "engine/residency.h"
#include "engine/shared_device.h"
#include "engine/stash.h"
#include "engine/step_planner.h"
#include "engine/step_state.h"
#include "engine/unfreezing.h"
#include "engine/updates.h"
#include "engine/value_ranges.h"
#include "optim/compute_format.h"
#include "optim/matrix_rule.h"
#include "trace/recorder.h"
#include "trace/trace_requests.h"

namespace patrickstar {

struct EngineOptions {
  DeviceOptions device;
  ResidencyOptions residency;
  DiskOptions disk;
  SpeculationMode speculation = SpeculationMode::kOff;
  // By parameter, as they lie in memory; what the next two go by.
  std::vector<std::vector<int64_t>> param_shapes;
  std::shared_ptr<const optim::MatrixRule> matrix_rule;        // null: none
  std::shared_ptr<const optim::ComputeFormat> compute_format;  // null: that of the chunk
  // From this device limit on the caller chooses larger chunks, which may need so much more (for the error that names
  // the least limit).
  int64_t ample_limit_bytes = kUnlimited;
  int64_t ample_extra_bytes = 0;
};

// Optimizer states and where they belong. Placed when a step's tide is known.
enum class StatesPlacing : uint8_t {
  kFirst,       // no step is over yet
  kOfUnfrozen,  // unfrozen chunks have states that no step has placed
  kDone,
};

struct OpenEngine {
  // Throws MemoryBudgetError when the model cannot fit. `module_params` lists the parameters that each module owns;
  // `kept` is host memory of an engine before this one, or null.
  OpenEngine(std::shared_ptr<SharedDevice> shared_device, Layout layout, std::vector<std::string> param_names,
             const std::vector<std::vector<ParamId>>& module_params, const EngineOptions& options,
             std::shared_ptr<Collectives> ranks, std::shared_ptr<KeptRegions> kept);
  OpenEngine(const OpenEngine&) = delete;
  OpenEngine& operator=(const OpenEngine&) = delete;

  // Ends what runs and frees all memory, every part of it also when another one fails. Throws what failed first.
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
  HostUpdates host_updates;
  HostUpdates disk_updates;
  DiskStates disk;
  UpdateStates update_states;
  Speculation speculation;
  Pager pager;
  Stash stash;
  Gradients gradients;
  MatrixUpdates matrices;
  Updates updates;
  GradientFlow flow;
  RankTurns turns;
  AccessTracker tracker;
  ChunkValues values;
  ValueRanges ranges;
  Residency residency;
  StepPlanner planner;
  Unfreezing unfreezing;
  StatesPlacing placing = StatesPlacing::kFirst;
};

}  // namespace patrickstar
