// The layout: which chunk and offset each parameter has. A pure function of the parameters' sizes.
//
// Parameters are packed in the order given (the order of registration, which for nearly all models is
// the order of first use), each aligned to kAlignment elements. Chunks are homogeneous: all parameters
// of a chunk have the same compute dtype and are all trainable or all frozen, so a frozen chunk carries
// no optimizer state. A parameter larger than the chunk size gets a chunk of its own.
//
//   Layout layout = Layout::pack({{1000, DType::kBFloat16, true}, ...}, /*chunk_numel=*/1 << 26);
//   layout.placement(0).chunk;  // 0
//
// Immutable after pack(); any thread may read it.
#pragma once

#include <cstdint>
#include <vector>

#include "common/dtype.h"
#include "common/types.h"

namespace patrickstar {

// 128 elements are 256 bytes in 16 bits and 512 in 32: enough for any vector load and for TMA.
constexpr int64_t kAlignment = 128;

struct ParamSpec {
  int64_t numel = 0;
  DType dtype = DType::kFloat32;  // compute dtype
  bool trainable = true;
};

struct Placement {
  ChunkId chunk = -1;
  int64_t offset = 0;  // elements
};

struct ChunkSpec {
  int64_t numel = 0;  // elements in use, alignment gaps included; what transfers move
  DType dtype = DType::kFloat32;
  bool trainable = true;
  std::vector<ParamId> params;  // by offset

  int64_t num_bytes(ArrayKind kind) const {
    return numel * ((kind == ArrayKind::kParam || kind == ArrayKind::kGrad) ? element_size(dtype) : 4);
  }
};

class Layout {
 public:
  // Throws ArgumentError when chunk_numel < kAlignment or a parameter has no elements.
  static Layout pack(const std::vector<ParamSpec>& params, int64_t chunk_numel);

  const std::vector<ParamSpec>& params() const { return params_; }
  const std::vector<ChunkSpec>& chunks() const { return chunks_; }
  const ParamSpec& param(ParamId id) const { return params_[static_cast<size_t>(id)]; }
  const ChunkSpec& chunk(ChunkId id) const { return chunks_[static_cast<size_t>(id)]; }
  const Placement& placement(ParamId id) const { return placements_[static_cast<size_t>(id)]; }
  int num_params() const { return static_cast<int>(params_.size()); }
  int num_chunks() const { return static_cast<int>(chunks_.size()); }
  int64_t chunk_numel() const { return chunk_numel_; }
  int64_t num_bytes(ArrayId array) const { return chunk(array.chunk).num_bytes(array.kind); }

 private:
  int64_t chunk_numel_ = 0;
  std::vector<ParamSpec> params_;
  std::vector<ChunkSpec> chunks_;
  std::vector<Placement> placements_;
};

}  // namespace patrickstar
