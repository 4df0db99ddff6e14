// Records which parameters have a gradient, and in which of their chunk's arrays. GradientFlow writes it
// (engine/gradient_flow.h), updates read it. Guarded by the engine's lock.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "chunk/chunk_store.h"

namespace patrickstar {

class Gradients {
 public:
  explicit Gradients(const ChunkStore& store)
      : store_(store), in_grad_(static_cast<size_t>(store.layout().num_params()), 0), in_sum_(in_grad_.size(), 0) {}

  bool has(ParamId param) const { return in_grad(param) || in_sum(param); }
  bool has_any(ChunkId chunk) const {
    const auto& params = store_.chunk(chunk).params;
    return std::any_of(params.begin(), params.end(), [this](ParamId param) { return has(param); });
  }
  std::vector<ParamId> in_chunk(ChunkId chunk) const {
    std::vector<ParamId> params;
    for (ParamId param : store_.chunk(chunk).params) {
      if (has(param)) params.push_back(param);
    }
    return params;
  }
  // kGradSum with several micro-batches; otherwise the array in which the chunk's gradients stay.
  ArrayKind source(ChunkId chunk) const {
    const bool sums = store_.array({chunk, ArrayKind::kGradSum}).exists();
    return sums ? ArrayKind::kGradSum : store_.chunk(chunk).grad_resting_tier();
  }

  // A gradient of the running or last micro-batch, in kGrad or kGradShard.
  bool in_grad(ParamId param) const { return in_grad_[static_cast<size_t>(param)] != 0; }
  void set_in_grad(ParamId param, bool has) { in_grad_[static_cast<size_t>(param)] = has ? 1 : 0; }
  // Gradients of earlier micro-batches, in kGradSum.
  bool in_sum(ParamId param) const { return in_sum_[static_cast<size_t>(param)] != 0; }
  void set_in_sum(ParamId param, bool has) { in_sum_[static_cast<size_t>(param)] = has ? 1 : 0; }
  bool any_in_sum() const {
    return std::any_of(in_sum_.begin(), in_sum_.end(), [](uint8_t has) { return has != 0; });
  }
  const std::vector<uint8_t>& flags() const { return in_grad_; }

 private:
  const ChunkStore& store_;
  std::vector<uint8_t> in_grad_;  // by parameter
  std::vector<uint8_t> in_sum_;
};

}  // namespace patrickstar
