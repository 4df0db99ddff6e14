// All that an open engine has below Python: its threads, queues, memory, chunks, and the parts that work on them, in the
// order in which they need each other. Closing the engine is destroying this, after shut_down().
//
// What it was given of ranks (`collectives`) it uses and does not own: their communicators live until all ranks have
// closed (patrickstar/ranks/distributed.py). Guarded by the runtime's lock.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "common/host_threads.h"
#include "runtime/access_tracker.h"
#include "runtime/chunk_gather.h"
#include "runtime/chunk_values.h"
#include "runtime/counters.h"
#include "runtime/gradient_flow.h"
#include "runtime/optimizer_step.h"
#include "runtime/pager.h"
#include "runtime/residency.h"
#include "runtime/step_planner.h"
#include "runtime/unfreezing.h"
#include "trace/trace_requests.h"

namespace patrickstar {

struct RuntimeOptions : ResidencyOptions {
  int cuda_device = -1;              // -1: the simulated device
  int64_t limit_rounding_bytes = 0;  // what PyTorch's CUDA allocator may take beyond a limit that it is given
  // From this device limit on the caller chooses larger chunks, which may need so much more (for the error that names
  // the least limit).
  int64_t ample_limit_bytes = kUnlimited;
  int64_t ample_extra_bytes = 0;
  HostThreadOptions host_threads;
  SpeculationMode speculation = SpeculationMode::kOff;
};

struct OpenRuntime {
  // Throws MemoryBudgetError when the model cannot fit. `mutex` is the runtime's lock, which the pager's handler of memory
  // pressure takes too.
  OpenRuntime(Layout layout, std::vector<std::string> param_names,
              const std::vector<std::vector<ParamId>>& module_params, const RuntimeOptions& options,
              std::shared_ptr<Collectives> collectives, std::recursive_timed_mutex& mutex);
  OpenRuntime(const OpenRuntime&) = delete;
  OpenRuntime& operator=(const OpenRuntime&) = delete;

  // Ends what runs and frees all memory, every part of it also when another one fails. Throws what failed first.
  void shut_down();

  const Layout& layout() const { return store.layout(); }

  const RuntimeOptions options;
  std::recursive_timed_mutex& mutex;
  std::shared_ptr<Collectives> collectives;
  std::unique_ptr<Backend> backend;
  HostThreads host_threads;
  ThreadPool pool;
  std::unique_ptr<optim::Compute> host_compute;
  std::unique_ptr<optim::Compute> cuda_compute;  // null on the simulated device
  SlotPool slots;
  std::vector<int>
      interleaved_nodes;  // that the arena's pages are spread over; none where they lie as they are touched
  HostArena arena;
  ChunkStore store;
  StepTracer tracer;
  TraceRequests traces;
  TransferEngine transfer;
  Recorder recorder;
  Counters counters;
  Pager pager;
  ChunkGather gather;
  AccessTracker tracker;
  GradientFlow gradients;
  OptimizerStep step;
  ChunkValues values;
  Residency residency;
  StepPlanner planner;
  Unfreezing unfreezing;
  bool warmed_up = false;
  bool has_new_states = false;  // of unfrozen chunks, which no complete step has placed yet
  bool ranks_go_alike = true;   // in all steps so far

 private:
  Core core();
};

}  // namespace patrickstar
