// The façade of the core: what Python's hooks, engine and optimizer call. It owns the parts, holds their one lock,
// and keeps the order of a step:
//
//   begin_forward  open_scope/touch/close_scope ...  end_forward
//   begin_backward enter_backward/fold ...           end_backward
//   prepare_step   apply_step or skip_step
//
// Calls may come from any thread (on CUDA, backward hooks run on an autograd thread); each takes the lock. None needs
// the Python interpreter. Hooks never see the optimizer; the runtime never sees an nn.Module.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
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
#include "runtime/use_listener.h"
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
  StreamingMode streaming = StreamingMode::kOff;
};

class Runtime final : public UseListener {
 public:
  Runtime(Layout layout, std::vector<std::string> param_names, const std::vector<std::vector<ParamId>>& module_params,
          const RuntimeOptions& options, std::shared_ptr<Collectives> collectives);
  ~Runtime() override;
  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;

  // Setting up: chunks get their storages, then parameters their values.
  void bind_storage(ChunkId chunk, c10::StorageImpl* storage);
  // All views of the chunk's storage are made: from now on it guards its memory.
  void seal_storage(ChunkId chunk);
  // One value of a parameter's float32 arrays, in the parameter's memory order. kMaster of a frozen parameter means its
  // compute value. What is read goes to host memory.
  void write_values(ParamId param, ArrayKind kind, ParamValues values);
  void read_values(ParamId param, ArrayKind kind, float* values);
  void read_own_values(ParamId param, ArrayKind kind, float* values);
  // The gradient of a parameter that has one, after prepare_step(); with a loss scale, scaled. A gradient that is written
  // is the ranks' mean, and prepare_step() must be called again.
  void read_gradient(ParamId param, float* values);
  void write_gradient(ParamId param, ParamValues values);
  // Before the first step: it will go as `timeline`, of an earlier run of the same layout, says, and take `times`, if
  // that run was measured. The first step then replays a plan; where it departs from it, it fetches on demand as any step
  // does.
  void adopt_timeline(Timeline timeline, std::optional<StepTimes> times);
  // Forgets all arrays of a chunk (a model that leaves its engine).
  void release_chunk(ChunkId chunk);
  // Frees everything and gives PyTorch's allocator back. Every later call but the destructor throws StateError:
  // autograd graphs may outlive the engine and still refer to this object.
  void close();
  bool closed() const { return closed_; }

  // Forward.
  void begin_forward(Tracking tracking);
  void end_forward();
  Tick open_scope(const std::vector<ParamId>& params, HoldUntil until) override;
  void close_scope() override;
  Tick tick() override;
  Tick touch(const std::vector<ParamId>& params) override;

  // Backward.
  // With the options and the factor on gradients that the step after it is expected to get (none: not known).
  void begin_backward(const std::vector<GroupOptions>& expected_groups, double expected_grad_scale);
  void enter_backward(Tick begin, Tick end, const std::vector<ParamId>& params) override;
  void fold_gradient(ParamId param, const void* data);
  void end_backward();
  // An exception left the forward: what it held is released. Gradients of earlier backwards stay.
  void abort_forward();
  // An exception left the backward: what it held is released, its gradients are forgotten.
  void abort_backward();
  // Pushes off the device what can leave it and gives cached memory back, before another try of what ran out of memory.
  void vacate_device(Vacate what);

  // Step.
  double prepare_step();  // the gradients' sum of squares
  void apply_step(const std::vector<GroupOptions>& groups, double grad_scale);
  void skip_step();
  void clear_gradients();
  // Goes back to fetching on demand until the next step is over (what changes is time, not numbers).
  void forget_plan();
  void clear_gradient(ParamId param);
  bool has_gradient(ParamId param);
  bool gradients_pending();

  // The next training step that begins is traced for `reader` (trace/trace_requests.h).
  void start_trace(TraceReader reader);
  // The traced step, once; nothing before it is over. Waits for the updates that it started.
  std::optional<StepTrace> take_trace(TraceReader reader);
  OptimizerStep& optimizer() { return *step_; }

  const Layout& layout() const { return store_.layout(); }
  const Counters& counters() const { return counters_; }
  const TransferCounters& transfer_counters() { return transfer_.counters(); }
  Backend& backend() { return *backend_; }
  const HostArena& arena() const { return arena_; }
  const ThreadPool& pool() const { return pool_; }
  // NUMA nodes that the arena's pages are spread over; none where they lie as they are touched.
  const std::vector<int>& interleaved_nodes() const { return interleaved_nodes_; }
  const ChunkStore& store() const { return store_; }
  const Timeline& last_timeline() const { return recorder_.last(); }
  const Plan& plan() const { return pager_->plan(); }
  // What a plan for the last timeline has to solve.
  PlanProblem plan_problem() const { return planner_->problem(); }
  // What a step takes, and what the next one is predicted to take; none before a step was measured.
  const std::optional<StepTimes>& step_times() const { return planner_->times(); }
  const std::optional<SimulatedStep>& predicted_step() const { return planner_->predicted(); }
  int num_device_state_chunks() const { return store_.num_on_device(ArrayKind::kMaster); }
  // The running step goes as planned so far.
  bool replays() const { return pager_->replays(); }
  int64_t payload_bytes() const { return slots_.used_bytes(); }
  void reset_report();

 private:
  // Holds the lock for one call; throws StateError when the runtime is closed.
  class Entry {
   public:
    explicit Entry(Runtime& runtime);

   private:
    std::lock_guard<std::recursive_timed_mutex> lock_;
  };

  Core core();
  void check_least_limit(const char* when);
  void finish_step(StepOutcome outcome);
  // With several ranks, what decisions are made from must be the same on all: `timeline` becomes so. What the others say.
  std::vector<std::string> agree_on(Timeline& timeline, const std::string& note);
  void forget_running_step();

  RuntimeOptions options_;
  std::recursive_timed_mutex mutex_;
  bool closed_ = false;
  std::shared_ptr<Collectives> collectives_;
  std::unique_ptr<Backend> backend_;
  HostThreads host_threads_;
  ThreadPool pool_;
  QueueDelays delays_;
  std::unique_ptr<optim::Compute> host_compute_;
  std::unique_ptr<optim::Compute> cuda_compute_;  // null on the simulated device
  SlotPool slots_;
  std::vector<int> interleaved_nodes_;
  HostArena arena_;
  ChunkStore store_;
  StepTracer tracer_;
  TraceRequests traces_;
  TransferEngine transfer_;
  Recorder recorder_;
  Counters counters_;
  std::unique_ptr<Pager> pager_;
  std::unique_ptr<ChunkGather> gather_;
  std::unique_ptr<AccessTracker> tracker_;
  std::unique_ptr<GradientFlow> gradients_;
  std::unique_ptr<OptimizerStep> step_;
  std::unique_ptr<ChunkValues> values_;
  std::unique_ptr<Residency> residency_;
  std::unique_ptr<StepPlanner> planner_;
  bool warmed_up_ = false;
  bool ranks_go_alike_ = true;  // in all steps so far
};

}  // namespace patrickstar
