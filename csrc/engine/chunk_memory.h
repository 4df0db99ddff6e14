// The memory that an engine's chunks lie in, and how payloads move between host and device: in order and without host
// synchronisation. What moves when, and what makes room for it, is decided elsewhere (engine/pager.h).
//
//   upload(array)     block -> slot, on the upload queue
//   download(array)   slot -> block, on the download queue, after the compute queue's present work
//
// Both must exist. The records keep the events, so that whoever reads next can wait. [Note: reuse of memory] When a
// slot's `busy` events are complete, nothing reads or writes its old content any more; a block is freed after
// settle_block only.
//
// Owned by the engine's open state (engine/open_engine.h), guarded by its lock.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "chunk/chunk_store.h"
#include "engine/shared_device.h"
#include "memory/host_arena.h"
#include "memory/slot_pool.h"
#include "memory/tide_memory.h"
#include "optim/compute.h"
#include "optim/compute_format.h"
#include "plan/recipe.h"
#include "trace/step_tracer.h"

namespace patrickstar {

using RecipeCounts = std::array<int64_t, kNumRecipes>;

// Everything that an engine counts; Python's report() is made of it.
struct Counters {
  int64_t uploaded_bytes = 0;
  int64_t downloaded_bytes = 0;
  int64_t num_evictions = 0;           // arrays pushed off the device while still of use
  int64_t num_prefetch_hits = 0;       // arrays that were on the device, or on their way, because the plan said so
  int64_t num_pressure_evictions = 0;  // of the evictions, those because something else needed device memory
  int64_t num_on_demand_fetches = 0;   // arrays brought in at the moment of their use
  int64_t gathered_bytes = 0;          // that came from other ranks' shards of values
  int64_t scattered_bytes = 0;         // of gradients, that came from other ranks
  int64_t num_moments = 0;
  int64_t num_replayed_moments = 0;  // moments that went as planned
  int64_t num_plans = 0;
  int64_t num_steps = 0;
  int64_t num_skipped_steps = 0;
  int64_t num_speculated_updates = 0;  // of chunks, started on the host before the step was decided
  int64_t num_settled_updates = 0;     // of those, computed for all factors near the last one
  RecipeCounts updates{};              // of chunks, by the recipe that was carried out
  int64_t stashed_bytes = 0;           // of activations, that left the device
  int64_t disk_read_bytes = 0;         // of optimizer states
  int64_t disk_written_bytes = 0;

  void count_update(Recipe recipe) { ++updates[static_cast<size_t>(recipe)]; }
};

class ChunkMemory {
 public:
  // `format`: null for the chunks' own; `shapes` of parameters by id, as they lie in memory, which outlive this.
  ChunkMemory(SharedDevice& device, Layout layout, std::vector<std::string> param_names,
              std::shared_ptr<const optim::ComputeFormat> format, const std::vector<std::vector<int64_t>>& shapes);
  ChunkMemory(const ChunkMemory&) = delete;
  ChunkMemory& operator=(const ChunkMemory&) = delete;

  SharedDevice& device() { return device_; }
  Backend& backend() { return device_.backend(); }
  optim::HostCompute& host_compute() { return device_.host_compute(); }
  optim::Compute& device_compute() { return device_.device_compute(); }
  quant::HostCompute& host_quantizer() { return device_.host_quantizer(); }
  SlotPool& slots() { return slots_; }
  TideMemory& tide_memory() { return tide_memory_; }
  HostArena& arena() { return *arena_; }
  ChunkStore& store() { return store_; }
  const ChunkStore& store() const { return store_; }
  const Layout& layout() const { return store_.layout(); }
  ArrayRecord& array(ArrayId id) { return store_.array(id); }
  const ArrayRecord& array(ArrayId id) const { return store_.array(id); }
  StepTracer& tracer() { return tracer_; }
  Counters& counters() { return counters_; }

  void upload(ArrayId id);
  void download(ArrayId id);
  // block -> `to`, which lies in a slot of another array. Returns the event after which it is there.
  Event upload_to(ArrayId id, void* to, const Slot& slot);

  // Later work of the compute queue sees the array's value in its slot.
  void await_on_device(ArrayId id);
  // Returns when the array's block has its value, and this thread may read and write it.
  void await_on_host(ArrayId id);
  // Returns when nobody uses the array's block any more, whatever became of its value: it may be freed.
  void settle_block(ArrayId id);
  // Later work of `queue` may write the slot: what still reads or writes its old content is over then.
  void await_slot(Queue queue, const Slot& slot);

  // Frees the device slot, which compute enqueued so far may use; the value must be elsewhere as well, derivable or
  // dead. A transfer under way is known to the slot already, and the compute queue does not wait for it.
  void leave_device(ArrayId id);
  // Frees the host block; the value must be on the device as well or dead.
  void drop_block(ArrayId id);
  // The same of what several ranks hold together, whose copies on the host go with the slot.
  void drop_slot(ArrayId id);
  // Forgets the value, wherever it is.
  void discard(ArrayId id);
  // The chunk's storage is where its slot is.
  void attach(ChunkId chunk);

  // round(master), of this rank's part, on the compute queue into device memory `to`, or here into host memory.
  void cast_on_device(ChunkId chunk, void* to);
  // The array, which is on the device, into device memory `to`, on the compute queue.
  void copy_on_device(ArrayId id, void* to);
  void cast_on_host(ChunkId chunk, void* to);
  // The compute values of a quantised chunk, of this rank's part, into device memory `to`, on `queue`. `quantized` is
  // device memory with the chunk's kQuantized.
  void dequantize(Queue queue, ChunkId chunk, void* quantized, void* to);
  // [Note: compute formats] The chunk's whole compute value, or one parameter's, was made in its slot by work of
  // `queue`: behind that it passes through the format. Returns false where there is none.
  bool present(Queue queue, ChunkId chunk);
  void present_param(Queue queue, ParamId param);
  bool has_format() const { return format_ != nullptr; }
  // Zeros in the array's block, by all threads.
  void clear_block(ArrayId id);

  // Compute values that several ranks hold together.
  bool is_whole(ArrayId id) const { return id.kind == ArrayKind::kParam && store_.chunk(id.chunk).is_sharded(); }
  // The compute value of a trainable chunk is round(master), that of a quantised one follows from its codes: it can be
  // dropped at any time. That of another frozen one is all there is.
  bool is_derivable(ArrayId id) const { return layout().row(id).source != Source::kNone; }

 private:
  // Returns when `event` is complete.
  void await(const Event& event, StallCause cause, ArrayId id);

  SharedDevice& device_;
  SlotPool slots_;
  TideMemory tide_memory_;
  const std::unique_ptr<HostArena> arena_;
  ChunkStore store_;
  StepTracer tracer_;
  Counters counters_;
  const std::shared_ptr<const optim::ComputeFormat> format_;
  const std::vector<std::vector<int64_t>>& shapes_;
};

}  // namespace patrickstar
