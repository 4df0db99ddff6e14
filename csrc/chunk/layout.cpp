#include "chunk/layout.h"

#include <map>
#include <utility>

#include "common/check.h"

namespace patrickstar {

namespace {

int64_t aligned(int64_t numel) { return (numel + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

Layout Layout::pack(const std::vector<ParamSpec>& params, int64_t chunk_numel) {
  PS_CHECK(chunk_numel >= kAlignment, ArgumentError, "default_chunk_size is ", chunk_numel, " elements, the least is ",
           kAlignment, "; choose 64 * 1024 or more");
  Layout layout;
  layout.chunk_numel_ = chunk_numel;
  layout.params_ = params;
  layout.placements_.resize(params.size());
  std::map<std::pair<DType, bool>, ChunkId> open;  // the chunk being filled, per class
  for (size_t id = 0; id < params.size(); ++id) {
    const ParamSpec& param = params[id];
    PS_CHECK(param.numel > 0, ArgumentError, "parameter ", id, " has ", param.numel, " elements; it needs at least 1");
    const int64_t need = aligned(param.numel);
    const auto key = std::make_pair(param.dtype, param.trainable);
    auto found = open.find(key);
    const bool fits = found != open.end() && layout.chunk(found->second).numel + need <= chunk_numel;
    ChunkId chunk;
    if (fits) {
      chunk = found->second;
    } else {
      chunk = layout.num_chunks();
      layout.chunks_.push_back({0, param.dtype, param.trainable, {}});
      // An oversized parameter does not close the chunk being filled: smaller ones that follow still fit there.
      if (need <= chunk_numel) open[key] = chunk;
    }
    ChunkSpec& spec = layout.chunks_[static_cast<size_t>(chunk)];
    layout.placements_[id] = {chunk, spec.numel};
    spec.numel += need;
    spec.params.push_back(static_cast<ParamId>(id));
  }
  return layout;
}

}  // namespace patrickstar
