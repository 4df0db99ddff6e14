// Reads and writes values of parameters and optimizer states in chunks, for initialisation, state_dict and
// load_state_dict. Callers see float32, whatever the chunk stores. Each call handles one parameter.
//
// Guarded by the engine's lock.
#pragma once

#include "engine/array_bytes.h"
#include "engine/pager.h"
#include "engine/quantized_values.h"

namespace patrickstar {

// Elements of a parameter that are staged in host memory at a time. Not measured.
constexpr int64_t kPieceNumel = int64_t{1} << 20;
inline int64_t float_bytes(int64_t numel) { return numel * static_cast<int64_t>(sizeof(float)); }

// float32 values of one parameter, in its memory order.
struct ParamValues {
  const float* data;
  Tier where;  // on the device: complete in the order of the compute queue
};

class ChunkValues {
 public:
  ChunkValues(Pager& pager, Collectives& collectives)
      : pager_(pager),
        memory_(pager.memory()),
        store_(pager.store()),
        collectives_(collectives),
        bytes_(pager),
        quantized_(pager) {}

  // Writes all ranks' values of a parameter; `values` may be freed afterwards. For a frozen parameter, kMaster means
  // its compute value. A missing state is made on tier `resting_tier`. While operations use the chunk, its device
  // buffer gets the new values at once. Throws StateError if a quantised chunk is in use, and ArgumentError for values
  // that are not finite and are to be quantised.
  void write(ParamId param, ArrayKind kind, ParamValues values, Tier resting_tier);
  // Reads all ranks' values to host memory `values`; all ranks must call it in the same order. A state that was never
  // made reads as zeros. Throws ArgumentError for a state of a frozen parameter.
  void read(ParamId param, ArrayKind kind, float* values);
  // Reads this rank's part alone (Layout::shard_of); no other rank takes part.
  void read_own(ParamId param, ArrayKind kind, float* values);
  // The array in host memory, where this thread may read it; null if it is on the device alone, or rests on the disk,
  // to which buffers are lent.
  char* readable(ArrayId id);
  // Rounds the master to the compute dtype, since a frozen parameter had no other value. Called when its training
  // begins.
  void round_master(ParamId param);
  // Makes an array of a trained chunk on the tier of the chunk's states, or on `resting_tier` if it has none; writes
  // its bytes as stored (`StoredRange`). On the device, bytes are complete in the order of the compute queue.
  void make_stored(ArrayId id, Tier resting_tier);
  void write_stored(ArrayId id, int64_t offset_bytes, ParamBytes from, int64_t num_bytes);
  // The parameter's gradient as the step will use it, in the chunk's array `source`. All ranks must call these in the
  // same order.
  void read_gradient(ParamId param, ArrayKind source, float* values);
  void write_gradient(ParamId param, ArrayKind source, ParamValues values);

 private:
  bool is_in_use(ChunkId chunk) const;
  // `values`: the whole parameter.
  void replace_in_use(ParamId param, ParamValues values);
  // The functions below write this rank's part alone.
  void write_own(ParamId param, ArrayKind kind, ParamValues values, Tier resting_tier);
  // Split masters, and variances beside them (optim/kernels.h), staged through host memory piece by piece.
  void write_split(ParamId param, ArrayKind kind, ParamValues values, Tier resting_tier);
  void split_in_place(ChunkId chunk, const ParamShard& shard, ParamValues values);
  void read_split(ParamId param, ArrayKind kind, float* values);
  // Reads arrays in host memory with all threads; false: they are elsewhere.
  bool join_in_place(ChunkId chunk, const ParamShard& shard, ArrayKind kind, float* values);
  // Parameters without a master.
  void write_bare(ParamId param, ParamValues values, Tier resting_tier);
  // Makes the compute value of a chunk whose states include it, on the tier of its leading state.
  void make_kept_param(ChunkId chunk, Tier resting_tier);
  // States of fewer bytes (optim/kernels.h), piece by piece.
  void write_compressed(ParamId param, ArrayKind kind, ParamValues values);
  void read_compressed(ParamId param, ArrayKind kind, float* values);
  void write_cast(ParamId param, ArrayId id, ParamValues values);
  void write_quantized(ParamId param, ParamValues values);
  void settle_on_device(ArrayId id);
  void read_cast(ParamId param, ArrayId id, float* values);
  void read_state(ParamId param, ArrayKind kind, float* values);
  // Completes `values` with the other ranks' parts.
  void gather(ParamId param, float* values);
  void discard_compute_values(ChunkId chunk);

  Pager& pager_;
  ChunkMemory& memory_;
  ChunkStore& store_;
  Collectives& collectives_;
  ArrayBytes bytes_;
  QuantizedValues quantized_;
};

}  // namespace patrickstar
