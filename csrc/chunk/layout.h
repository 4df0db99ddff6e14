// The layout: chunk and offset of each parameter, a pure function of the parameters' sizes.
//
// Parameters are packed in the given order, usually registration order, aligned to kAlignment elements. All parameters
// of a chunk have the same compute dtype, state types, trainability, quantisation and ranks. A frozen chunk has no
// optimizer states until train(). A parameter larger than the chunk size gets its own chunk.
//
//   Layout layout = Layout::pack({{1000, DType::kBFloat16, true}, ...}, /*chunk_numel=*/1 << 26);
//   layout.placement(0).chunk;  // 0
//
// Placements never change after pack(), and any thread may read them. Trainability changes between steps only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "chunk/array_rows.h"
#include "common/dtype.h"
#include "common/quantized.h"
#include "common/types.h"

namespace patrickstar {

// In elements: 256 bytes of 16-bit values, enough for any vector load and for TMA.
constexpr int64_t kAlignment = 128;

constexpr int64_t kShardAlignment = 4096;

// This rank among those that share one copy of a chunk. The chunk is cut into num_ranks equal shards, and rank r keeps
// the r-th. Cuts and parameters lie at multiples of kShardAlignment elements, so no statistics block (optim/kernels.h)
// is cut; the chunk's end is padded. A chunk of one rank is its own shard.
struct Sharding {
  int num_ranks = 1;
  int rank = 0;
};

// Which ranks of an engine share a chunk. Every rank has all chunks, with the same ids and sizes. Parameters that
// different ranks share are in different chunks.
class ChunkRanks {
 public:
  // All ranks of the engine share it.
  ChunkRanks() = default;
  // A parameter is divided into `count` parts, such as experts. Rank r has part r % count, and shares it with the ranks
  // of the same part. Throws ArgumentError unless `count` is positive.
  static ChunkRanks of_parts(int count);

  // This rank among those that share the chunk. Throws ArgumentError, naming `what`, unless the number of parts divides
  // that of ranks.
  Sharding among(const Sharding& engine, const std::string& what) const;

 private:
  explicit ChunkRanks(int num_parts) : num_parts_(num_parts) {}

  int num_parts_ = 1;
};

struct Placement {
  ChunkId chunk = -1;
  int64_t offset = 0;  // elements
};

// The part of a parameter in this rank's shard of its chunk.
struct ParamShard {
  int64_t begin = 0;   // first element, within the parameter
  int64_t numel = 0;   // 0: none
  int64_t offset = 0;  // within the shard
};

// A subset of optimizer_arrays(), in order.
class StateKinds {
 public:
  void add(ArrayKind kind) { kinds_[size_++] = kind; }
  const ArrayKind* begin() const { return kinds_; }
  const ArrayKind* end() const { return kinds_ + size_; }
  size_t size() const { return size_; }

 private:
  ArrayKind kinds_[3] = {};
  size_t size_ = 0;
};

// Place of a gradient until the step. kOfParam: the place of its parameter, which a float32 master restores; no place
// at all if updates run in backward. kOwn: its own, since nothing restores the parameter.
enum class GradientPlace : uint8_t { kOfParam, kOwn };

// The optimizer arrays of a trained parameter: each of optimizer_arrays() whose type is not kNone. Code that handles
// all states of a chunk iterates over kinds().
//
//   master      bytes per parameter (float32 accesses)      compute value               gradient
//   kFloat32    14; 16 for speculative updates             round(master), droppable    in the value's place
//   kLowerHalf  12 and gradients in flight; 14 with kOwn   part of the state           own memory until its update
//   kNone       as kLowerHalf, without the master          the only copy, rounded      own memory until its update
//                                                          stochastically
//
// Lower halves (optim/kernels.h) need their compute value, so the two stay together. kOwn: a speculative update puts
// new values in place, for which whole masters need 2 bytes more.
//
// Updates store 16-bit and 8-bit moments directly (optim/kernels.h). 8-bit moments have blocks, so their parameters
// begin at multiples of kStateBlock.
struct StateFormat {
  StateType master = StateType::kFloat32;
  StateType momentum = StateType::kFloat32;
  StateType variance = StateType::kFloat32;
  GradientPlace gradient = GradientPlace::kOfParam;

  StateType of(ArrayKind kind) const {
    return kind == ArrayKind::kMaster ? master : kind == ArrayKind::kMomentum ? momentum : variance;
  }
  bool has(ArrayKind kind) const { return of(kind) != StateType::kNone; }
  StateKinds kinds() const {
    StateKinds result;
    for (ArrayKind kind : optimizer_arrays()) {
      if (has(kind)) result.add(kind);
    }
    return result;
  }
  friend bool operator<(const StateFormat& a, const StateFormat& b) {
    return std::tie(a.master, a.momentum, a.variance, a.gradient) <
           std::tie(b.master, b.momentum, b.variance, b.gradient);
  }
};

// Address of a state's element, and of its block's scale (8-bit states; else null).
struct StatePlace {
  void* data = nullptr;
  float* scales = nullptr;
};

struct ParamSpec {
  int64_t numel = 0;
  DType dtype = DType::kFloat32;  // compute dtype
  bool trainable = true;
  StateFormat states;                         // if trainable
  QuantType quantization = QuantType::kNone;  // if frozen
  ChunkRanks ranks{};
};

struct ChunkSpec {
  int64_t numel = 0;        // alignment gaps included; transfers move them all
  int64_t shard_numel = 0;  // one rank's part
  DType dtype = DType::kFloat32;
  bool trainable = true;
  std::vector<ParamId> params;  // by offset
  StateFormat states;           // if trainable
  QuantType quantization = QuantType::kNone;
  Sharding sharding;  // among the ranks that share the chunk
  ArrayRows rows;     // built by Layout

  int64_t num_bytes(ArrayKind kind) const { return rows[kind].num_bytes; }
  // Values are all-gathered and gradients reduce-scattered.
  bool is_sharded() const { return sharding.num_ranks > 1; }
  // Arrays that updates read and write, kept from step to step.
  ArrayKind param_resting_tier() const { return is_sharded() ? ArrayKind::kParamShard : ArrayKind::kParam; }
  ArrayKind grad_resting_tier() const { return is_sharded() ? ArrayKind::kGradShard : ArrayKind::kGrad; }
  // The chunk's values are codes and scales (kQuantized), from which the device makes its compute value at any time.
  // The array has the codes of this rank's shard, then
  //
  //   NF4    an 8-bit scale per block; a float32 scale per super block of each parameter, counted from its start; a
  //          float32 offset per parameter. The latter two cover the whole chunk: they are few, and a shard may end
  //          within a super block.
  //   int8   a float32 scale per block
  bool is_quantized() const { return quantization != QuantType::kNone; }
  // Parameter `index`'s part of the codes at `array`: its `shard`, where the parameter begins at `offset` in the chunk.
  QuantizedPart quantized_part(void* array, int index, int64_t offset, const ParamShard& shard) const;
  StateKinds state_kinds() const { return states.kinds(); }
  // The array beside the compute value that is made first and leaves the device last, so it tells where all of them
  // are.
  ArrayKind leading_state() const { return is_quantized() ? ArrayKind::kQuantized : *state_kinds().begin(); }
  // Place of element `index` in the state at `array`; null if the state does not exist.
  StatePlace state_place(ArrayKind kind, void* array, int64_t index) const {
    const StateType type = states.of(kind);
    if (type == StateType::kNone) return {};
    auto* bytes = static_cast<char*>(array);
    float* scales = is_8_bit(type) ? reinterpret_cast<float*>(bytes + scales_offset(shard_numel, index)) : nullptr;
    return {bytes + state_offset(type, index), scales};
  }
  bool splits_master() const { return states.master == StateType::kLowerHalf; }
  // Once trained, the compute value is part of the optimizer state, or the only copy of the parameter.
  bool keeps_param() const { return states.master != StateType::kFloat32; }
  // Speculative updates write new values in place of the old ones (optim/kernels.h).
  bool puts_values_in_place() const { return splits_master() && states.gradient == GradientPlace::kOwn; }
  // Updates round stochastically (optim/kernels.h).
  bool draws_random_bits() const {
    return states.master == StateType::kNone || states.momentum == StateType::kBFloat16 ||
           states.variance == StateType::kBFloat16;
  }
  // True for arrays that contain parts of a split master.
  bool is_in_split(ArrayKind kind) const {
    if (!splits_master()) return false;
    return kind == ArrayKind::kMaster || (kind == ArrayKind::kVariance && states.variance == StateType::kFloat32);
  }
};

class Layout {
 public:
  // `ranks`: the engine's. Throws ArgumentError if
  // - chunk_numel < kAlignment, or a parameter has no elements;
  // - a trained parameter is to be quantised;
  // - a master other than float32 belongs to values other than bfloat16;
  // - the number of a parameter's parts does not divide that of ranks.
  static Layout pack(const std::vector<ParamSpec>& params, int64_t chunk_numel, Sharding ranks = {});

  // Makes an unquantised chunk trainable. Parameters without gradients keep their values.
  void train(ChunkId id);

  const std::vector<ParamSpec>& params() const { return params_; }
  const std::vector<ChunkSpec>& chunks() const { return chunks_; }
  const ParamSpec& param(ParamId id) const { return params_[static_cast<size_t>(id)]; }
  const ChunkSpec& chunk(ChunkId id) const { return chunks_[static_cast<size_t>(id)]; }
  const Placement& placement(ParamId id) const { return placements_[static_cast<size_t>(id)]; }
  int num_params() const { return static_cast<int>(params_.size()); }
  int num_chunks() const { return static_cast<int>(chunks_.size()); }
  int64_t chunk_numel() const { return chunk_numel_; }
  // The engine's ranks, whatever chunks they share. With several, this one takes part in all joint decisions.
  int num_ranks() const { return ranks_.num_ranks; }
  bool has_other_ranks() const { return num_ranks() > 1; }
  // Elements before this rank's shard.
  int64_t shard_begin(ChunkId id) const { return chunk(id).sharding.rank * chunk(id).shard_numel; }
  ParamShard shard_of(ParamId id) const;
  ArrayId param_resting_tier(ChunkId id) const { return {id, chunk(id).param_resting_tier()}; }
  ArrayId grad_resting_tier(ChunkId id) const { return {id, chunk(id).grad_resting_tier()}; }
  // The array with a chunk's values while nothing uses it or updates it, masters aside.
  ArrayId value_resting_tier(ChunkId id) const { return {id, chunk(id).rows.value().kind}; }
  // This rank's shard of a quantised parameter, within its chunk's kQuantized at `array`.
  QuantizedPart quantized_part(ParamId id, void* array) const;
  const ArrayRow& row(ArrayId array) const { return chunk(array.chunk).rows[array.kind]; }
  int64_t num_bytes(ArrayId array) const { return row(array).num_bytes; }

 private:
  int64_t chunk_numel_ = 0;
  Sharding ranks_;
  std::vector<ParamSpec> params_;
  std::vector<ChunkSpec> chunks_;
  std::vector<Placement> placements_;
};

}  // namespace patrickstar
