// A chunk's update as jobs for the kernels, and the queue on which the host runs them.
//
//   UpdateJobs     makes one job for each whole matrix and each range of parameters that share a group and a step
//                  count, and copies for parameters without a gradient. Keeps each parameter's group and step count.
//   HostUpdates    updates of chunks whose states are in host memory, on a queue of their own. One runs at a time, on
//                  all threads of the pool. Those that make new values run in the order of the next forward
//                  (common/work_queue.h)
//
//   Event done = updates.submit({chunk, jobs, restores, carries, {gradient.host_ready}});
//   record.host_ready = done;   // readers of the host buffer wait for it
//
// An update owns nothing: its buffers must stay until its event is complete, which their records ensure. If a
// gradient's download fails, its update fails too and leaves the states unchanged.
//
// Guarded by the engine's lock, except tasks on the queue.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "backend/backend.h"
#include "common/tracing.h"
#include "common/work_queue.h"
#include "engine/gradients.h"
#include "engine/group_options.h"
#include "engine/matrix_updates.h"
#include "optim/compute.h"

namespace patrickstar {

// New values of a chunk in separate memory: all of them, or its parameters alone.
struct NewValues {
  std::vector<HostBuffer> states;  // of ChunkSpec::state_kinds(), or none
  HostBuffer param;
  bool is_scale_independent = true;  // false: some parameters are scale-dependent
  Event done;
  // For an in-place update (optim/kernels.h): the record of the parameters, which have no value until the step, and the
  // jobs that wrote the new ones.
  ArrayRecord* place = nullptr;
  std::vector<optim::UpdateJob> put;

  bool has_states() const { return !states.empty(); }
  bool are_in_place() const { return place != nullptr; }
};

// [Note: two-phase updates] The next forward waits for the new compute values alone. A two-phase update on the host
// writes them in phase one: 16 bytes of memory traffic per parameter in 16-bit training. Phase two updates the states
// from the same inputs (26 bytes), beside later work; a one-phase update takes 28. The gradient stays until phase two
// is complete. Both phases round alike, so the value is that of the new master to the last bit.
enum class Pass : uint8_t {
  kWhole,
  kParam,           // writes the compute value
  kStates,          // writes the states
  kBetween,         // writes scale-independent compute values, and keeps the inputs of the others (optim/kernels.h)
  kScaleDependent,  // writes the scale-dependent ones
  // In place (optim/kernels.h):
  kPut,                // writes compute values over the old ones
  kPutScaleDependent,  // writes the scale-dependent values
  kPutStates,          // phase two: writes the states
  kTakeBack,           // rollback: writes the old values again
};

// Destination of the new compute value.
enum class ParamPlace : uint8_t {
  kGradient,  // the gradient's memory, which becomes the value's
  kOwn,       // the old value's memory, if the gradient is a sum of micro-batches or the value is a state
  kNew,       // separate memory
};

// Tier and memory of one chunk's update.
struct UpdateTarget {
  bool on_device;
  const void* grad;
  DType grad_dtype;
  void* param;
  ParamPlace place = ParamPlace::kNew;
  const NewValues* apart = nullptr;  // destination of new states; null: in place
  void* scratch = nullptr;           // MatrixUpdates::scratch_bytes
};

// out = round(in): the value of a parameter without a gradient, written to the new value's memory.
struct Restore {
  const float* in;
  void* out;
  DType dtype;
  int64_t numel;
};

// Copies states of parameters without a gradient to the separate memory of an update.
struct Carry {
  const void* in;
  void* out;
  int64_t num_bytes;
};

// Order of an update on the host among waiting ones.
enum class Turn : uint8_t {
  kInOrder,  // in the order of submission
  kOfNeed,   // among neighbours of this kind, in the order in which the next forward needs the chunks
};

struct HostUpdate {
  ChunkId chunk = -1;  // the first chunk that it updates
  Pass pass = Pass::kWhole;
  Turn turn = Turn::kInOrder;
  std::vector<optim::UpdateJob> jobs;  // in host memory
  std::vector<Restore> restores;
  std::vector<Carry> carries;
  std::vector<Event> after;                            // downloads of the gradients, earlier updates
  std::vector<Event> states;                           // read from the disk, or on their way down
  std::shared_ptr<const std::atomic<bool>> cancelled;  // if true by then, nothing is done; may be null

  bool is_cancelled() const { return cancelled != nullptr && *cancelled; }
};

SpanLabel update_label(Track track, ChunkId first_chunk, const std::vector<optim::UpdateJob>& jobs);

class UpdateJobs {
 public:
  UpdateJobs(const ChunkStore& store, const Gradients& gradients, const MatrixUpdates& matrices);

  void set_group(ParamId param, int group) { group_of_[static_cast<size_t>(param)] = group; }
  int64_t step_count(ParamId param) const { return step_counts_[static_cast<size_t>(param)]; }
  void set_step_count(ParamId param, int64_t count) { step_counts_[static_cast<size_t>(param)] = count; }
  // Increments the step counts of the chunk's parameters with a gradient.
  void count_step(ChunkId chunk);

  // `groups`: by index. Gradients are multiplied by `grad_scale` first.
  void add(ChunkId chunk, const UpdateTarget& target, const std::vector<GroupOptions>& groups, float grad_scale,
           std::vector<optim::UpdateJob>& jobs) const;
  std::vector<Restore> restores(ChunkId chunk, const UpdateTarget& target) const;
  std::vector<Carry> carries(ChunkId chunk, const NewValues& values) const;

 private:
  const ChunkStore& store_;
  const Gradients& gradients_;
  const MatrixUpdates& matrices_;
  std::vector<int> group_of_;         // by parameter
  std::vector<int64_t> step_counts_;  // by parameter
};

class HostUpdates {
 public:
  // `track`: for one-phase updates.
  HostUpdates(Backend& backend, optim::HostCompute& compute, Tracer& tracer, ThreadPriority priority,
              Track track = Track::kHostAdam)
      : backend_(backend), compute_(compute), tracer_(tracer), track_(track), queue_(priority) {}

  // Returns the event that completes the update. If it throws, nothing was submitted.
  Event submit(HostUpdate update) { return submit(std::make_shared<const HostUpdate>(std::move(update))); }
  Event submit(std::shared_ptr<const HostUpdate> update);
  void run_here(const HostUpdate& update) { run(update, nullptr); }
  // Runs other work on the queue, in the order of submission.
  Event submit_task(std::function<void()> task) { return queue_.submit(std::move(task)); }
  // WorkQueue::num_over and await_more_over.
  int64_t num_over() { return queue_.num_over(); }
  bool await_more_over(int64_t num_seen) { return queue_.await_more_over(num_seen); }
  // Time that updates waited for states from the disk, after all their other inputs were complete.
  double waited_seconds() const { return static_cast<double>(waited_nanoseconds_.load()) * 1e-9; }

 private:
  bool is_ready(const HostUpdate& update) const;
  void await_states(const HostUpdate& update);
  void run(const HostUpdate& update, HostSpan* span);

  Backend& backend_;
  optim::HostCompute& compute_;
  Tracer& tracer_;
  const Track track_;
  std::atomic<int64_t> waited_nanoseconds_{0};
  WorkQueue queue_;
};

}  // namespace patrickstar
