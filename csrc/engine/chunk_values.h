// Values of parameters and their optimizer states, in and out of chunks: what initialisation, state_dict and
// load_state_dict use. float32 at the border, whatever the chunk holds; one parameter at a time, so that nothing of the
// model's size is ever copied.
//
// Guarded by the engine's lock.
#pragma once

#include "engine/array_bytes.h"
#include "engine/pager.h"
#include "engine/quantized_values.h"

namespace patrickstar {

// Elements of a parameter that pass through host memory at a time.
constexpr int64_t kPieceNumel = int64_t{1} << 20;
inline int64_t float_bytes(int64_t numel) { return numel * static_cast<int64_t>(sizeof(float)); }

// float32 values of one parameter, in its memory order.
struct ParamValues {
  const float* data;
  Tier where;  // on the device: complete when the compute queue gets there
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

  // kMaster of a frozen parameter means its compute value. An optimizer array that does not exist yet is made on
  // `home`. `values` may be freed afterwards. While operations use the chunk, new values take the old ones' place in
  // its slot. Throws StateError where such a chunk is quantised, and ArgumentError where a value that is not finite is
  // to be quantised.
  void write(ParamId param, ArrayKind kind, ParamValues values, Tier home);
  // With several ranks all must read, in the same order. `values` is host memory. A moment that was never made reads as
  // zeros. Throws ArgumentError for a state of a frozen parameter.
  void read(ParamId param, ArrayKind kind, float* values);
  // The same of this rank's part alone (Layout::shard_of), which takes no other rank.
  void read_own(ParamId param, ArrayKind kind, float* values);
  // The float32 value becomes the compute value, which all of a frozen parameter is: it is trained from now on.
  void round_master(ParamId param);
  // [Note: stored elements] An array of a trained chunk, made on `home` unless its states are somewhere already; and
  // bytes of it as they are stored. On the device they are there when the compute queue gets there.
  void make_stored(ArrayId id, Tier home);
  void write_stored(ArrayId id, int64_t offset_bytes, ParamBytes from, int64_t num_bytes);
  // The parameter's gradient, as the step will use it, which is in the chunk's array `source`. With several ranks all
  // must call these, in the same order.
  void read_gradient(ParamId param, ArrayKind source, float* values);
  void write_gradient(ParamId param, ArrayKind source, ParamValues values);

 private:
  bool is_in_use(ChunkId chunk) const;
  // `values` are all of the parameter's.
  void replace_in_use(ParamId param, ParamValues values);
  // These see this rank's part alone.
  void write_own(ParamId param, ArrayKind kind, ParamValues values, Tier home);
  // [Note: split masters] A master, or a variance beside one, in pieces that pass through host memory.
  void write_split(ParamId param, ArrayKind kind, ParamValues values, Tier home);
  void split_in_place(ChunkId chunk, const ParamShard& shard, ParamValues values);
  void read_split(ParamId param, ArrayKind kind, float* values);
  // Of a parameter without a master, likewise.
  void write_bare(ParamId param, ParamValues values, Tier home);
  // The compute value of a chunk whose optimizer state it is a part of, and what tells where it belongs.
  void make_kept_param(ChunkId chunk, Tier home);
  // [Note: states of fewer bytes], likewise.
  void write_compressed(ParamId param, ArrayKind kind, ParamValues values);
  void read_compressed(ParamId param, ArrayKind kind, float* values);
  void write_cast(ParamId param, ArrayId id, ParamValues values);
  void write_quantized(ParamId param, ParamValues values);
  void settle_on_device(ArrayId id);
  void read_cast(ParamId param, ArrayId id, float* values);
  void read_state(ParamId param, ArrayKind kind, float* values);
  // Completes `values`, of which this rank's part is there.
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
