// The façade of the core: what Python's hooks, engine and optimizer call. It holds the engine's open state
// (engine/open_engine.h), takes the device's lock, and keeps the order of a step:
//
//   begin_forward  open_scope/touch/close_scope ...  end_forward
//   begin_backward enter_backward/fold ...           end_backward
//   prepare_step   apply_step or skip_step
//
// Calls may come from any thread (on CUDA, backward hooks run on an autograd thread); each takes the lock, and may wait
// for it, so the caller must not hold the Python interpreter. None needs it. Hooks never see the optimizer; the runtime
// never sees an nn.Module. Every call but the destructor throws StateError once the runtime is closed, and in a fork of
// the process that made it (common/process_fork.h).
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "common/process_fork.h"
#include "engine/open_engine.h"
#include "engine/runtime_report.h"
#include "engine/use_listener.h"

namespace patrickstar {

// How far a step that has failed had come.
enum class StepProgress : uint8_t {
  kUntouched,  // nothing is updated
  kInPart,     // some chunks are; the same call finishes it
  kTorn,       // a chunk is neither updated nor as it was
  kEnding,     // all are, or the step is skipped; the same call finishes it
};

class Runtime final : public UseListener {
 public:
  Runtime(Layout layout, std::vector<std::string> param_names, const std::vector<std::vector<ParamId>>& module_params,
          const EngineOptions& options, std::shared_ptr<Collectives> collectives,
          std::shared_ptr<KeptRegions> kept = nullptr);
  // Where nobody closed it, what runs with other ranks is aborted: it waits for none of them.
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
  // Many of this rank's at once (engine/value_ranges.h), for which no other rank is needed.
  void read_ranges(const std::vector<ValueRange>& ranges, const std::vector<RangeFile>& files);
  void write_ranges(const std::vector<ValueRange>& ranges, const std::vector<RangeFile>& files);
  // [Note: stored elements], by parameter. Addresses hold until the chunk is released, and are complete for what runs
  // on the compute queue after this.
  std::vector<int64_t> stored_bytes(ParamId param);
  bool is_stored_on_device(ParamId param);
  std::vector<const void*> stored_on_device(ParamId param);
  void write_stored(ParamId param, const std::vector<StoredRange>& ranges);
  // The device keeps nothing that could be had again from other arrays or ranks.
  void drop_derivable();
  // What the allocator has cached goes back to the device: on CUDA it counts as tide.
  void return_cached();
  // Device memory, on the compute queue.
  void copy_on_device(void* to, const void* from, int64_t num_bytes);
  // Frees what the chunk has on the device and the host, whose values are elsewhere; close() comes soon.
  void leave_stored(ChunkId chunk);
  // The same [Note: values set aside]; close() must come next.
  ValueRanges::SetAside set_aside(const std::vector<ValueRange>& ranges);
  // The gradient of a parameter that has one, after prepare_step(); with a loss scale, scaled. A gradient that is
  // written is the ranks' mean, and prepare_step() must be called again.
  void read_gradient(ParamId param, float* values);
  void write_gradient(ParamId param, ParamValues values);
  // Before the first step: it will go as `timeline`, of an earlier run of the same layout, says, and take `times`, if
  // that run was measured. The first step then replays a plan; where it departs from it, it fetches on demand as any
  // step does. With several ranks all must be here.
  void adopt_timeline(Timeline timeline, std::optional<StepTimes> times);
  // Parameters that were frozen are to be trained (engine/unfreezing.h): states of their chunks, all of them or none;
  // then the parameters that were not trained so far, or back. With several ranks all must, between the same forwards.
  void make_states(const std::vector<ChunkId>& chunks);
  void discard_states(const std::vector<ChunkId>& chunks);
  void train(const std::vector<ParamId>& params);
  // Forgets all arrays of a chunk (a model that leaves its engine).
  void release_chunk(ChunkId chunk);
  // Ends all threads, frees all memory and gives PyTorch's allocator back, whatever fails meanwhile; throws what failed
  // first. Idempotent. Autograd graphs may outlive the engine and still refer to this object.
  void close();
  // Host memory that this gives back from now on stays as it is, for another engine's constructor.
  std::shared_ptr<KeptRegions> keep_memory();
  bool closed();

  // Forward.
  // `attempt`: whether it is the first one, and whether the caller makes another one when it runs out of device memory.
  void begin_forward(Tracking tracking, Attempt attempt);
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
  // The last backward was that of another engine's loss ([Note: joint backward], patrickstar/engine/joint_backward.py):
  // whether it gave this one gradients. If not, it counts for nothing; where nothing is trained it ends the step.
  bool keep_joint_backward();
  // Within a forward or a backward, at a point where all ranks come to wait for each other by other means than the
  // engine's: returns when they have, each served with what it needed on the way. In a replay nobody has to be waited
  // for.
  void meet_ranks();
  // Activations in host memory (engine/stash.h).
  int64_t tide_bytes();
  int64_t host_room_of_activations();
  // The highest tide of what was alive at once since the last call.
  int64_t take_live_tide_peak();
  // What the running step has had on the host will stay on the device where the tide is `most_bytes` at most with it:
  // the next plan counts it.
  void keep_absent_activations(int64_t most_bytes);
  Stash::Ticket stash_activation(const void* data, int64_t num_bytes);
  bool is_stashed(Stash::Ticket ticket);
  void finish_stashing(Stash::Ticket ticket);
  void fetch_activation(Stash::Ticket ticket, void* to);
  void await_activation(Stash::Ticket ticket);
  // Any thread, also after close().
  void drop_activation(Stash::Ticket ticket);
  // The forward ran out of device memory and will be made again: as if it had not begun. Its activations are gone.
  void undo_forward();
  // By chunk, or empty: whether the device makes the host's update, in pieces of so many elements (engine/visits.h).
  void set_visits(const std::vector<bool>& chunks, int64_t piece_numel);
  // Pushes off the device what can leave it and gives cached memory back, before another try of what ran out of memory.
  void vacate_device(Vacate what);
  // An exception left the forward: what it held is released. Gradients of earlier backwards stay.
  void abort_forward();
  // An exception left the backward: what it held is released, its gradients are forgotten. Returns how many chunks it
  // had updated for good ([Note: committed updates]).
  int abort_backward();

  // Step.
  // The gradients' sum of squares, but for those of `left_out`, which ranks beyond these have too and count.
  double prepare_step(std::vector<ParamId> left_out = {});
  // Where these throw they may be called again, with the same, as step_progress() says.
  void apply_step(const std::vector<GroupOptions>& groups, double grad_scale, double clip_ratio);
  void skip_step();
  StepProgress step_progress();
  // A step that has failed is given up with its gradients; values are as they are, of several steps.
  void drop_step();
  void clear_gradients();
  // Goes back to fetching on demand until the next step is over (what changes is time, not numbers).
  void forget_plan();
  void clear_gradient(ParamId param);
  bool has_gradient(ParamId param);
  bool gradients_pending();

  // The optimizer's options of a parameter, and how often it was updated.
  void set_group(ParamId param, int group);
  int64_t step_count(ParamId param);
  void set_step_count(ParamId param, int64_t count);
  // Chunks that a backward has updated for good ([Note: committed updates]).
  int num_committed();

  // The next training step that begins is traced for `reader` (trace/trace_requests.h).
  void start_trace(TraceReader reader);
  // The traced step, once; nothing before it is over. Waits for the updates that it started.
  std::optional<StepTrace> take_trace(TraceReader reader);

  RuntimeReport report();
  void reset_report();
  int64_t num_pressure_evictions();
  Timeline last_timeline();
  Plan plan();
  // What a plan for the last timeline has to solve; its `timeline` is null.
  PlanProblem plan_problem();
  // What a step takes, and what the next one is predicted to take; none before a step was measured.
  std::optional<StepTimes> step_times();
  std::optional<SimulatedStep> predicted_step();
  // The running step goes as planned so far.
  bool replays();
  State param_state(ParamId param);
  State chunk_state(ChunkId chunk);
  bool is_on_device(ArrayId array);
  Tier home(ChunkId chunk);
  // What a test makes the disk do.
  std::shared_ptr<DiskFaults> disk_faults();

 private:
  // The open state, for one call, with the lock; throws StateError when there is none here.
  class Entry {
   public:
    explicit Entry(Runtime& runtime);
    OpenEngine* operator->() const { return open_; }
    OpenEngine& operator*() const { return *open_; }

   private:
    std::unique_lock<SharedDevice::Lock> lock_;
    OpenEngine* open_;
  };
  // For a call that uses chunks where the calling thread computes, or is ordered by that ([Note: one compute queue]).
  Entry compute();
  void check_process() const;

  const ProcessFork made_in_ = ProcessFork::current();
  std::shared_ptr<SharedDevice::Lock> lock_;  // the device's, which is gone when all of its engines are closed
  std::unique_ptr<OpenEngine> open_;          // null: closed
};

}  // namespace patrickstar
