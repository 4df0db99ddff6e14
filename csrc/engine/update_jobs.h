// What one chunk's update consists of, and the queue on which the host does it.
//
//   UpdateJobs     a chunk's update as jobs for the kernels, one for each range of parameters that share a group
//                  and a step count and for each whole matrix, and copies for parameters that have no gradient. Keeps
//                  each parameter's group and step count.
//   HostUpdates    updates of chunks whose states are in host memory: on the host's threads, beside everything else, on
//                  a queue of their own, one after the other, each on all threads of the pool; what makes new values
//                  as the next forward needs them ([Note: the order of need], common/work_queue.h)
//
//   Event done = updates.submit({chunk, jobs, restores, carries, {gradient.host_ready}});
//   record.host_ready = done;   // whoever reads the block waits for it
//
// An update owns nothing: its blocks must stay until its event is over, which their records see to. One whose gradient
// did not come down fails with the download, and leaves its states as they were.
//
// Guarded by the engine's lock, but for what runs on the queue.
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

// New values of a chunk, in memory of their own: all of them, or those of its parameters alone.
struct NewValues {
  std::vector<HostBlock> states;  // of ChunkSpec::state_kinds(), or none
  HostBlock param;
  bool is_settled = true;  // else some of the parameters are open
  Event done;
  // [Note: values in place]: where there is no such memory, the record of the old parameters, which have no value until
  // the step, and what put the new ones there.
  ArrayRecord* place = nullptr;
  std::vector<optim::UpdateJob> put;

  bool has_states() const { return !states.empty(); }
  bool are_in_place() const { return place != nullptr; }
};

// [Note: parameters first] What the next forward waits for is the new compute value. An update on the host may be made
// in two passes: one that writes it and nothing else (16 bytes of memory traffic per parameter in 16-bit training), and
// one behind, beside whatever follows, that updates the states from the same inputs (26 bytes; 28 take both in one).
// The gradient stays until then. Both passes round alike, so that the value is that of the new master to the last bit.
enum class Pass : uint8_t {
  kWhole,
  kParam,    // writes the compute value
  kStates,   // writes the states
  kBetween,  // writes compute values that are settled, and keeps what makes the others ([Note: settled values])
  kOpen,     // writes these
  // [Note: values in place]
  kPut,        // writes compute values over the old ones
  kPutOpen,    // and those that were left open
  kPutStates,  // writes the states behind
  kTakeBack,   // writes the old values again
};

// Where the new compute value goes.
enum class ParamPlace : uint8_t {
  kGradient,  // into the gradient's memory, which becomes its own
  kOwn,       // where the old one is: the gradient is another array (a sum of micro-batches'), or the value a state
  kNew,       // into memory of its own, apart from both
};

// Where one chunk's update happens and where its result goes.
struct UpdateTarget {
  bool on_device;
  const void* grad;
  DType grad_dtype;
  void* param;
  ParamPlace place = ParamPlace::kNew;
  const NewValues* apart = nullptr;  // new states go there
  void* scratch = nullptr;           // of MatrixUpdates::scratch_bytes
};

// out = round(in), where a parameter without a gradient has its value in what will be the gradient's place.
struct Restore {
  const float* in;
  void* out;
  DType dtype;
  int64_t numel;
};

// Values that an update apart from its states does not write: those of a parameter without a gradient.
struct Carry {
  const void* in;
  void* out;
  int64_t num_bytes;
};

// When the host makes an update, among those that wait for it.
enum class Turn : uint8_t {
  kInOrder,  // after those that were submitted before it, and before those after it
  kOfNeed,   // as the next forward needs the chunks, among neighbours of this kind ([Note: the order of need])
};

struct HostUpdate {
  ChunkId chunk = -1;  // the first of those that it updates
  Pass pass = Pass::kWhole;
  Turn turn = Turn::kInOrder;
  std::vector<optim::UpdateJob> jobs;  // in host memory
  std::vector<Restore> restores;
  std::vector<Carry> carries;
  std::vector<Event> after;                            // downloads of the gradients, updates before it
  std::vector<Event> states;                           // read from the disk, or on their way down
  std::shared_ptr<const std::atomic<bool>> cancelled;  // nothing is done when it is true by then; may be null

  bool is_cancelled() const { return cancelled != nullptr && *cancelled; }
};

// How a trace names an update.
SpanLabel update_label(Track track, ChunkId first_chunk, const std::vector<optim::UpdateJob>& jobs);

class UpdateJobs {
 public:
  UpdateJobs(const ChunkStore& store, const Gradients& gradients, const MatrixUpdates& matrices);

  void set_group(ParamId param, int group) { group_of_[static_cast<size_t>(param)] = group; }
  int64_t step_count(ParamId param) const { return step_counts_[static_cast<size_t>(param)]; }
  void set_step_count(ParamId param, int64_t count) { step_counts_[static_cast<size_t>(param)] = count; }
  // The chunk was updated.
  void count_step(ChunkId chunk);

  // `groups` by index; gradients are multiplied by `grad_scale` first.
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
  // `track`: of updates in one pass.
  HostUpdates(Backend& backend, optim::HostCompute& compute, Tracer& tracer, Track track = Track::kHostAdam)
      : backend_(backend), compute_(compute), tracer_(tracer), track_(track) {}

  // Complete when the update is. Where it throws nothing was submitted.
  Event submit(HostUpdate update) { return submit(std::make_shared<const HostUpdate>(std::move(update))); }
  Event submit(std::shared_ptr<const HostUpdate> update);
  // Returns when the update is made, on this thread.
  void run_here(const HostUpdate& update) { run(update, nullptr); }
  // What other passes than updates need on the queue, in its order.
  Event submit_task(std::function<void()> task) { return queue_.submit(std::move(task)); }
  // As the queue's.
  int64_t num_over() { return queue_.num_over(); }
  bool await_more_over(int64_t num_seen) { return queue_.await_more_over(num_seen); }
  // What updates have waited for their states so far, after all else that they wait for.
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
