// Identifiers and the vocabulary that several layers share.
//
//   parameter   one nn.Parameter of the user's module. Its id is its index in registration order.
//   chunk       a contiguous block that holds many parameters. Its id is its index in the layout.
//   array       one of the blocks that a chunk consists of (see ArrayKind); a chunk's arrays share one
//               layout, element for element.
//   payload     the bytes of one array. It can be on the device, on the host, on both, or nowhere.
//   tide        device memory taken by everything that is not a payload (activations, workspaces).
//   moment      one step of the access sequence: some arrays are needed at once.
#pragma once

#include <array>
#include <cstdint>

namespace patrickstar {

using ParamId = int32_t;
using ChunkId = int32_t;

// The arrays of a chunk. Which are optimizer states is said once, in optimizer_arrays(); which of these a chunk has,
// and of which types, in chunk/layout.h ([Note: arrays of a parameter]).
enum class ArrayKind : uint8_t {
  kParam,     // compute copy, in the chunk's compute dtype; the only array of a frozen chunk that is not quantised
  kGrad,      // gradient of the running micro-batch, in the compute dtype
  kGradSum,   // sum of earlier micro-batches' gradients, float32; exists only while accumulating
  kMaster,    // float32 parameter
  kMomentum,  // float32, a running mean or sum of gradients
  kVariance,  // float32, Adam's running mean of squared ones
  // With several ranks [Note: shards]; kGradSum and the three states above are this rank's share as well then.
  kParamShard,  // this rank's share of the compute copy; kParam is gathered from all ranks' shares
  kGradShard,   // this rank's share of the ranks' mean gradient, which comes of all ranks' kGrad
  kQuantized,   // of a frozen chunk: codes and scales ([Note: quantised chunks], chunk/layout.h), this rank's share
};
constexpr int kNumArrayKinds = 9;

constexpr const char* array_kind_name(ArrayKind kind) {
  constexpr const char* names[kNumArrayKinds] = {"param",    "grad",        "grad_sum",   "master",   "momentum",
                                                 "variance", "param_shard", "grad_shard", "quantized"};
  return names[static_cast<int>(kind)];
}

// In the order in which they are made.
constexpr std::array<ArrayKind, 3> optimizer_arrays() {
  return {ArrayKind::kMaster, ArrayKind::kMomentum, ArrayKind::kVariance};
}
constexpr bool is_optimizer_state(ArrayKind kind) {
  return kind == ArrayKind::kMaster || kind == ArrayKind::kMomentum || kind == ArrayKind::kVariance;
}

// Names one payload: an array of a chunk.
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

// kDisk: below the host, for optimizer states alone, which pass through host memory (engine/disk_states.h).
enum class Tier : uint8_t { kHost, kDevice, kDisk };

}  // namespace patrickstar
