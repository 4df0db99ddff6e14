// The layout: which chunk and offset each parameter has. A pure function of the parameters' sizes.
//
// Parameters are packed in the order given (the order of registration, which for nearly all models is
// the order of first use), each aligned to kAlignment elements. Chunks are homogeneous: all parameters
// of a chunk have the same compute dtype and states of the same types, and are all trainable or all frozen, so a frozen
// chunk carries no optimizer state until it is trained (train()); frozen ones are quantised alike. A parameter larger
// than the chunk size gets a chunk of its own.
//
// [Note: ranks of a chunk] Every rank of an engine has all chunks, with the same ids and sizes. Ranks that share one
// hold one copy of it together. Others have values of their own in it, as an expert that lives on one rank. Parameters
// that other ranks share are in other chunks.
//
// [Note: shards] A chunk is cut into as many shards of equal size as ranks share it, and each of these keeps one: the
// r-th. The cuts are multiples of kShardAlignment elements, and parameters begin at such multiples, so that no block of
// statistics (optim/kernels.h) is cut. A chunk is padded at its end. The shard of a chunk that one rank has alone is
// the chunk.
//
//   Layout layout = Layout::pack({{1000, DType::kBFloat16, true}, ...}, /*chunk_numel=*/1 << 26);
//   layout.placement(0).chunk;  // 0
//
// Placements never change after pack(), and any thread may read them; what is trainable changes between steps only.
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

// 128 elements are 256 bytes in 16 bits and 512 in 32: enough for any vector load and for TMA.
constexpr int64_t kAlignment = 128;

constexpr int64_t kShardAlignment = 4096;

// Which of the ranks that hold one copy of something together this is.
struct Sharding {
  int num_ranks = 1;
  int rank = 0;
};

// The engine's ranks in groups, each of which shares a chunk ([Note: ranks of a chunk]). Ranks of a group have numbers
// that follow each other.
class ChunkRanks {
 public:
  // All ranks of the engine share it.
  ChunkRanks() = default;
  // Each rank has its own.
  static ChunkRanks own() { return ChunkRanks(1); }
  // Throws ArgumentError unless `size` is positive.
  static ChunkRanks groups_of(int size);

  // This rank in its group. Throws ArgumentError, which names `what`, where the engine has no communicator of that
  // group: it has one of all ranks alone.
  Sharding among(const Sharding& engine, const std::string& what) const;

 private:
  static constexpr int kAll = 0;
  explicit ChunkRanks(int group_size) : group_size_(group_size) {}

  int group_size_ = kAll;
};

struct Placement {
  ChunkId chunk = -1;
  int64_t offset = 0;  // elements
};

// The part of a parameter that lies in this rank's shard of its chunk.
struct ParamShard {
  int64_t begin = 0;   // its first element, in the parameter
  int64_t numel = 0;   // 0: nothing of it is here
  int64_t offset = 0;  // in the shard
};

// Some of optimizer_arrays(), in their order.
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

// Where a gradient waits for the step: in the place of its parameter, which a float32 master gives back (or nowhere,
// where updates are committed in backward), or in one of its own beside a parameter that nothing gives back.
enum class GradientPlace : uint8_t { kOfParam, kOwn };

// [Note: arrays of a parameter] Which arrays make up a trained parameter, beside its compute value and its gradient:
// those of optimizer_arrays() whose type here is not kNone. Bytes, placements and plans follow from it, and whoever
// does something to all of a chunk's states goes over kinds().
//
// With whole masters the compute value is round(master): it may be dropped at any time, and its gradient takes its
// place until the step. Lower halves are nothing without their compute value ([Note: split masters], optim/kernels.h):
// it stays where the states are, and a gradient has memory of its own until its update, which should therefore be
// early. So this is 12 bytes per parameter and what gradients take on their way, and with whole masters it is 14. The
// same holds without a master (kNone): the bfloat16 parameter is all there is, rounded stochastically by each update.
// Where a gradient beside a lower half waits for the norm (kOwn), 14 bytes are all that it takes to compute new values
// ahead of it: they take the old ones' place ([Note: values in place], optim/kernels.h), where whole masters need 16.
//
// Moments of 16 or 8 bits are stored so by the update that makes them ([Note: states of fewer bytes], optim/kernels.h).
// Of 8 bits they are stored in blocks, so parameters begin at multiples of kStateBlock then.
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

// Where an element of an optimizer state is, and the scale of the block that it begins; null but for 8 bits.
struct StatePlace {
  void* data = nullptr;
  float* scales = nullptr;
};

struct ParamSpec {
  int64_t numel = 0;
  DType dtype = DType::kFloat32;  // compute dtype
  bool trainable = true;
  StateFormat states;                         // when it is trainable
  QuantType quantization = QuantType::kNone;  // when it is not
  ChunkRanks ranks{};
};

struct ChunkSpec {
  int64_t numel = 0;        // elements in use, alignment gaps included; what transfers move
  int64_t shard_numel = 0;  // of these, what one rank keeps
  DType dtype = DType::kFloat32;
  bool trainable = true;
  std::vector<ParamId> params;  // by offset
  StateFormat states;           // when it is trainable
  QuantType quantization = QuantType::kNone;
  Sharding sharding;  // among the ranks that share it
  ArrayRows rows;     // by all of the above; Layout makes them

  int64_t num_bytes(ArrayKind kind) const { return rows[kind].num_bytes; }
  // Several ranks share it: its values are gathered, and its gradients scattered.
  bool is_sharded() const { return sharding.num_ranks > 1; }
  // The arrays that updates read and write: values and gradients where they are kept from step to step.
  ArrayKind param_home() const { return is_sharded() ? ArrayKind::kParamShard : ArrayKind::kParam; }
  ArrayKind grad_home() const { return is_sharded() ? ArrayKind::kGradShard : ArrayKind::kGrad; }
  // [Note: quantised chunks] The values of a quantised chunk are codes and scales, kQuantized, from which its compute
  // value is derived on the device at any time, as that of a trained one is from its master. The array has the codes of
  // all elements of this rank's share, then
  //
  //   NF4    the scales of 8 bits of its blocks; a float32 scale of each super block of each parameter, counted from
  //          the parameter's beginning; a float32 offset of each parameter. The latter two are those of the whole
  //          chunk: few, and a share may end within a super block.
  //   int8   a float32 scale of each of its blocks
  bool is_quantized() const { return quantization != QuantType::kNone; }
  // Of what lies at `array`, the part that is the `index`-th parameter's: `shard` of it, which has the chunk's offset
  // `offset`.
  QuantizedPart quantized_part(void* array, int index, int64_t offset, const ParamShard& shard) const;
  // The states that it has when it is trained.
  StateKinds state_kinds() const { return states.kinds(); }
  // Of what it keeps beside its compute value, the array that is made first and leaves the device last, and so tells
  // where all of them are.
  ArrayKind leading_state() const { return is_quantized() ? ArrayKind::kQuantized : *state_kinds().begin(); }
  // Of element `index` of the state that lies at `array`; null where there is none.
  StatePlace state_place(ArrayKind kind, void* array, int64_t index) const {
    const StateType type = states.of(kind);
    if (type == StateType::kNone) return {};
    auto* bytes = static_cast<char*>(array);
    float* scales = is_8_bit(type) ? reinterpret_cast<float*>(bytes + scales_offset(shard_numel, index)) : nullptr;
    return {bytes + state_offset(type, index), scales};
  }
  bool splits_master() const { return states.master == StateType::kLowerHalf; }
  // Once it is trained, the compute value is a part of the optimizer state, or all that there is of the parameter.
  bool keeps_param() const { return states.master != StateType::kFloat32; }
  // Once it is trained, new values take the old ones' place before the norm is known ([Note: values in place],
  // optim/kernels.h).
  bool puts_values_in_place() const { return splits_master() && states.gradient == GradientPlace::kOwn; }
  // Whether an update rounds stochastically ([Note: random bits], optim/kernels.h).
  bool draws_random_bits() const {
    return states.master == StateType::kNone || states.momentum == StateType::kBFloat16 ||
           states.variance == StateType::kBFloat16;
  }
  // Whether the state, or a part of it, is one of the arrays that a split master consists of.
  bool is_in_split(ArrayKind kind) const {
    if (!splits_master()) return false;
    return kind == ArrayKind::kMaster || (kind == ArrayKind::kVariance && states.variance == StateType::kFloat32);
  }
};

class Layout {
 public:
  // `ranks` are the engine's. Throws ArgumentError when chunk_numel < kAlignment, a parameter has no elements, one that
  // is trained is to be quantised, masters are to be split or left out of other values than bfloat16, or a parameter is
  // to be shared by some of several ranks.
  static Layout pack(const std::vector<ParamSpec>& params, int64_t chunk_numel, Sharding ranks = {});

  // From now on the chunk, which is not quantised, and its parameters are trainable: those that get no gradient keep
  // their values.
  void train(ChunkId id);

  const std::vector<ParamSpec>& params() const { return params_; }
  const std::vector<ChunkSpec>& chunks() const { return chunks_; }
  const ParamSpec& param(ParamId id) const { return params_[static_cast<size_t>(id)]; }
  const ChunkSpec& chunk(ChunkId id) const { return chunks_[static_cast<size_t>(id)]; }
  const Placement& placement(ParamId id) const { return placements_[static_cast<size_t>(id)]; }
  int num_params() const { return static_cast<int>(params_.size()); }
  int num_chunks() const { return static_cast<int>(chunks_.size()); }
  int64_t chunk_numel() const { return chunk_numel_; }
  // Ranks of the engine. One that has others takes part in what all of them decide, whatever chunks they share.
  int num_ranks() const { return ranks_.num_ranks; }
  bool has_other_ranks() const { return num_ranks() > 1; }
  // Elements before this rank's shard.
  int64_t shard_begin(ChunkId id) const { return chunk(id).sharding.rank * chunk(id).shard_numel; }
  ParamShard shard_of(ParamId id) const;
  ArrayId param_home(ChunkId id) const { return {id, chunk(id).param_home()}; }
  ArrayId grad_home(ChunkId id) const { return {id, chunk(id).grad_home()}; }
  // The array that has a chunk's values when nobody uses it and no update is under way, but for a trained one's master.
  ArrayId value_home(ChunkId id) const { return {id, chunk(id).rows.value().kind}; }
  // Where this rank's share of a quantised parameter is in its chunk's kQuantized at `array`.
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
