// Identifiers and terms of several layers.
//
//   parameter      one nn.Parameter of the user's module. Its id is its index in registration order.
//   chunk          a contiguous block that holds many parameters. Its id is its index in the layout.
//   array          one of the blocks of a chunk (`ArrayKind`). All arrays of a chunk share one element layout.
//   chunk buffer   the bytes of one array: on the device, on the host, on both, or nowhere.
//   activation memory   device memory of everything else (activations, workspaces).
//   access         one entry of the step's access sequence: the arrays needed at once.
#pragma once

#include <array>
#include <cstdint>

namespace patrickstar {

using ParamId = int32_t;
using ChunkId = int32_t;

constexpr int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// The arrays of a chunk. chunk/layout.h says which arrays a chunk has and their types.
enum class ArrayKind : uint8_t {
  kParam,     // parameter in the compute dtype; the only array of a frozen chunk that is not quantised
  kGrad,      // gradient of the current micro-batch, in the compute dtype
  kGradSum,   // sum of earlier micro-batches' gradients, float32; exists only while accumulating
  kMaster,    // float32 parameter
  kMomentum,  // float32, running mean or sum of gradients
  kVariance,  // float32, Adam's running mean of squared gradients
  // With several ranks; kGradSum and the three states above then hold this rank's shard.
  kParamShard,  // this rank's shard of the parameters; kParam is all-gathered from the shards
  kGradShard,   // this rank's shard of the mean gradient, reduce-scattered from kGrad
  kQuantized,   // frozen chunk: this rank's shard of codes and scales
};
constexpr int kNumArrayKinds = 9;

constexpr const char* array_kind_name(ArrayKind kind) {
  constexpr const char* names[kNumArrayKinds] = {"param",    "grad",        "grad_sum",   "master",   "momentum",
                                                 "variance", "param_shard", "grad_shard", "quantized"};
  return names[static_cast<int>(kind)];
}

// In the order of their creation.
constexpr std::array<ArrayKind, 3> optimizer_arrays() {
  return {ArrayKind::kMaster, ArrayKind::kMomentum, ArrayKind::kVariance};
}
constexpr bool is_optimizer_state(ArrayKind kind) {
  return kind == ArrayKind::kMaster || kind == ArrayKind::kMomentum || kind == ArrayKind::kVariance;
}

// Names one array of one chunk.
struct ArrayId {
  ChunkId chunk = -1;
  ArrayKind kind = ArrayKind::kParam;

  int index() const { return chunk * kNumArrayKinds + static_cast<int>(kind); }
  static ArrayId from_index(int index) {
    return {index / kNumArrayKinds, static_cast<ArrayKind>(index % kNumArrayKinds)};
  }
  friend bool operator==(ArrayId a, ArrayId b) { return a.index() == b.index(); }
  friend bool operator!=(ArrayId a, ArrayId b) { return !(a == b); }
  friend bool operator<(ArrayId a, ArrayId b) { return a.index() < b.index(); }
};

// kDisk holds optimizer states only; they pass through host memory (engine/disk_states.h).
enum class Tier : uint8_t { kHost, kDevice, kDisk };

}  // namespace patrickstar
