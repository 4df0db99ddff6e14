// Memory of an engine's chunks, and copies between host and device. Copies are ordered by queues and events, without
// waiting on the host. The pager decides which array moves and what makes room for it (engine/pager.h).
//
//   upload(array)     host buffer -> device buffer, on the upload queue
//   download(array)   device buffer -> host buffer, on the download queue, after the work that compute has enqueued
//
// Both buffers must exist. An array's record keeps the events that later readers wait for. After a device buffer's
// `busy` events are complete, nothing reads or writes its old content. A host buffer may be freed after settle_block()
// only.
//
// Owned by OpenEngine (engine/open_engine.h), guarded by the engine's lock.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "chunk/chunk_store.h"
#include "engine/shared_device.h"
#include "memory/activation_memory.h"
#include "memory/device_buffer_pool.h"
#include "memory/host_arena.h"
#include "optim/compute.h"
#include "optim/compute_format.h"
#include "plan/recipe.h"
#include "trace/step_tracer.h"

namespace patrickstar {

using RecipeCounts = std::array<int64_t, kNumRecipes>;

// Everything that an engine counts; Python's report() shows it.
struct Counters {
  int64_t uploaded_bytes = 0;
  int64_t downloaded_bytes = 0;
  int64_t num_evictions = 0;      // arrays evicted from the device although they will be used again
  int64_t num_prefetch_hits = 0;  // arrays that a planned prefetch had brought, or started to bring, before their use
  int64_t num_pressure_evictions = 0;  // evictions that other demands for device memory caused
  int64_t num_on_demand_fetches = 0;   // arrays brought to the device at their use
  int64_t gathered_bytes = 0;          // received from other ranks by all-gathers of values
  int64_t scattered_bytes = 0;         // received from other ranks by reduce-scatters of gradients
  int64_t num_accesses = 0;
  int64_t num_replayed_accesses = 0;  // accesses that matched the plan
  int64_t num_plans = 0;
  int64_t num_steps = 0;
  int64_t num_skipped_steps = 0;
  int64_t num_speculated_updates = 0;         // chunk updates started on the host before the norm was known
  int64_t num_scale_independent_updates = 0;  // speculative updates computed for a range of clipping coefficients
  RecipeCounts updates{};                     // chunk updates, by recipe
  int64_t offloaded_bytes = 0;                // activations copied to the host
  int64_t disk_read_bytes = 0;                // optimizer states
  int64_t disk_written_bytes = 0;

  void count_update(Recipe recipe) { ++updates[static_cast<size_t>(recipe)]; }
};

class ChunkMemory {
 public:
  // Bytes of an array, from `offset` on, and where they go.
  struct Piece {
    void* to;
    int64_t offset;
    int64_t num_bytes;
  };

  // `format`: null for the chunks' own dtype. `shapes`: by parameter, in memory order; the caller keeps it alive.
  ChunkMemory(SharedDevice& device, Layout layout, std::vector<std::string> param_names,
              std::shared_ptr<const optim::ComputeFormat> format, const std::vector<std::vector<int64_t>>& shapes);
  ChunkMemory(const ChunkMemory&) = delete;
  ChunkMemory& operator=(const ChunkMemory&) = delete;

  SharedDevice& device() { return device_; }
  Backend& backend() { return device_.backend(); }
  optim::HostCompute& host_compute() { return device_.host_compute(); }
  optim::Compute& device_compute() { return device_.device_compute(); }
  quant::HostCompute& host_quantizer() { return device_.host_quantizer(); }
  DeviceBufferPool& device_buffers() { return device_buffers_; }
  ActivationMemory& activation_memory() { return activation_memory_; }
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
  // Copies the host buffer to `to`, which lies in `device_buffer`, a buffer of another array. Returns the event that
  // completes it.
  Event upload_to(ArrayId id, void* to, const DeviceBuffer& device_buffer);
  // Copies pieces of the host buffer to device memory, which the upload queue may write. Returns the event that
  // completes them.
  Event upload_pieces(ArrayId id, const std::vector<Piece>& pieces);

  // Later work of the compute queue sees the array's value in its device buffer.
  void await_on_device(ArrayId id);
  // Returns when the host buffer has the array's value and this thread may read and write it.
  void await_on_host(ArrayId id);
  // Returns when nothing uses the host buffer, whatever became of its value; the buffer may then be freed.
  void settle_block(ArrayId id);
  // Later work of `queue` may write the device buffer, after all that reads or writes its old content.
  void await_device_buffer(Queue queue, const DeviceBuffer& device_buffer);

  // Frees the device buffer, which compute enqueued so far may use. The value must exist elsewhere, be derivable, or be
  // dead. The buffer's `busy` events cover a running transfer; the compute queue does not wait for it.
  void leave_device(ArrayId id);
  // Frees the host buffer. The value must be on the device or dead.
  void drop_host_buffer(ArrayId id);
  // leave_device(), and drop_host_buffer() if is_whole().
  void drop_device_buffer(ArrayId id);
  void discard(ArrayId id);
  void attach(ChunkId chunk);

  // Writes round(master) of this rank's part to device memory `to`, on the compute queue.
  void cast_on_device(ChunkId chunk, void* to);
  // Copies the array from its device buffer to device memory `to`, on the compute queue.
  void copy_on_device(ArrayId id, void* to);
  // Writes round(master) of this rank's part to host memory `to`; returns when it is written.
  void cast_on_host(ChunkId chunk, void* to);
  // Writes the compute values of this rank's part of a quantised chunk to device memory `to`, on `queue`. `quantized`
  // is device memory with the chunk's kQuantized array.
  void dequantize(Queue queue, ChunkId chunk, void* quantized, void* to);
  // Rounds the compute values in the chunk's device buffer to the engine's compute format (optim/compute_format.h), on
  // `queue`. present() returns false where the engine has no format or the chunk is frozen.
  bool present(Queue queue, ChunkId chunk);
  void present_param(Queue queue, ParamId param);
  bool has_format() const { return format_ != nullptr; }
  void clear_block(ArrayId id);

  // Compute values of a chunk that ranks share: an all-gather fills them.
  bool is_whole(ArrayId id) const { return id.kind == ArrayKind::kParam && store_.chunk(id.chunk).is_sharded(); }
  // The value can be made again and may be dropped at any time: round(master) of a trainable chunk, or dequantised
  // codes.
  bool is_derivable(ArrayId id) const { return layout().row(id).source != Source::kNone; }

 private:
  void await(const Event& event, StallCause cause, ArrayId id);

  SharedDevice& device_;
  DeviceBufferPool device_buffers_;
  ActivationMemory activation_memory_;
  const std::unique_ptr<HostArena> arena_;
  ChunkStore store_;
  StepTracer tracer_;
  Counters counters_;
  const std::shared_ptr<const optim::ComputeFormat> format_;
  const std::vector<std::vector<int64_t>>& shapes_;
};

}  // namespace patrickstar
