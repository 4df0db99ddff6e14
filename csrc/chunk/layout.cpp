#include "chunk/layout.h"

#include <algorithm>
#include <map>
#include <utility>

#include "common/check.h"

namespace patrickstar {

namespace {

int64_t rounded_up(int64_t numel, int64_t multiple) { return (numel + multiple - 1) / multiple * multiple; }

int64_t alignment_of(const ParamSpec& param, const Sharding& sharding) {
  if (sharding.num_ranks > 1) return kShardAlignment;
  if (param.quantization != QuantType::kNone) return kQuantAlignment;
  return is_8_bit(param.states.momentum) || is_8_bit(param.states.variance) ? kStateBlock : kAlignment;
}

// Of NF4: those of a parameter begin behind all that the ones before it can have.
int64_t num_super_scales(int64_t numel, size_t num_params) {
  return numel / kNf4SuperBlock + static_cast<int64_t>(num_params);
}

}  // namespace

static_assert(kShardAlignment % kQuantAlignment == 0 && kQuantAlignment % kNf4Block == 0 &&
              kQuantAlignment % kInt8Block == 0);

int64_t ChunkSpec::quantized_bytes() const {
  constexpr int64_t kFloat = sizeof(float);
  switch (quantization) {
    case QuantType::kNone:
      return 0;
    case QuantType::kNf4:
      return shard_numel / 2 + shard_numel / kNf4Block +
             kFloat * (num_super_scales(numel, params.size()) + static_cast<int64_t>(params.size()));
    case QuantType::kInt8:
      return shard_numel + kFloat * (shard_numel / kInt8Block);
  }
  return 0;
}

QuantizedPart ChunkSpec::quantized_part(void* array, int index, int64_t offset, const ParamShard& shard) const {
  auto* const codes = static_cast<uint8_t*>(array);
  QuantizedPart part;
  part.type = quantization;
  part.first = shard.begin;
  part.numel = shard.numel;
  part.codes = codes + code_bytes(quantization, shard.offset);
  if (quantization == QuantType::kInt8) {
    part.scales = reinterpret_cast<float*>(codes + shard_numel) + shard.offset / kInt8Block;
    return part;
  }
  uint8_t* const block_scales = codes + shard_numel / 2;
  auto* const scales = reinterpret_cast<float*>(block_scales + shard_numel / kNf4Block);
  part.block_scales = block_scales + shard.offset / kNf4Block;
  part.scales = scales + num_super_scales(offset, static_cast<size_t>(index));
  part.offset = scales + num_super_scales(numel, params.size()) + index;
  return part;
}

Layout Layout::pack(const std::vector<ParamSpec>& params, int64_t chunk_numel, Sharding sharding) {
  PS_CHECK(sharding.num_ranks >= 1 && sharding.rank >= 0 && sharding.rank < sharding.num_ranks, ArgumentError, "rank ",
           sharding.rank, " of ", sharding.num_ranks, " ranks: give a rank from 0 to one less than their number");
  PS_CHECK(chunk_numel >= kAlignment, ArgumentError, "default_chunk_size is ", chunk_numel, " elements, the least is ",
           kAlignment, "; choose 64 * 1024 or more");
  Layout layout;
  layout.chunk_numel_ = chunk_numel;
  layout.sharding_ = sharding;
  layout.params_ = params;
  for (ParamSpec& param : layout.params_) {
    if (param.quantization != QuantType::kNone && !param.trainable) param.states = {};  // it never has any
  }
  layout.placements_.resize(params.size());
  std::map<std::tuple<DType, bool, StateFormat, QuantType>, ChunkId> open;  // the chunk being filled, per class
  for (size_t id = 0; id < params.size(); ++id) {
    const ParamSpec& param = layout.params_[id];
    PS_CHECK(param.numel > 0, ArgumentError, "parameter ", id, " has ", param.numel, " elements; it needs at least 1");
    const bool is_whole = param.states.master == StateType::kFloat32;
    PS_CHECK(is_whole || param.dtype == DType::kBFloat16, ArgumentError, "parameter ", id, " is ",
             dtype_name(param.dtype), ", and only masters of bfloat16 values are split or left out; give it a float32 ",
             "master");
    PS_CHECK(param.quantization == QuantType::kNone || !param.trainable, ArgumentError, "parameter ", id,
             " is trained and was to be quantised; only frozen parameters can be");
    const int64_t need = rounded_up(param.numel, alignment_of(param, sharding));
    const auto key = std::make_tuple(param.dtype, param.trainable, param.states, param.quantization);
    auto found = open.find(key);
    const bool fits = found != open.end() && layout.chunk(found->second).numel + need <= chunk_numel;
    ChunkId chunk;
    if (fits) {
      chunk = found->second;
    } else {
      chunk = layout.num_chunks();
      layout.chunks_.push_back({0, 0, param.dtype, param.trainable, {}, param.states, param.quantization});
      // An oversized parameter does not close the chunk being filled: smaller ones that follow still fit there.
      if (need <= chunk_numel) open[key] = chunk;
    }
    ChunkSpec& spec = layout.chunks_[static_cast<size_t>(chunk)];
    layout.placements_[id] = {chunk, spec.numel};
    spec.numel += need;
    spec.params.push_back(static_cast<ParamId>(id));
  }
  for (ChunkSpec& spec : layout.chunks_) {
    if (sharding.num_ranks > 1) spec.numel = rounded_up(spec.numel, sharding.num_ranks * kShardAlignment);
    spec.shard_numel = spec.numel / sharding.num_ranks;
  }
  return layout;
}

void Layout::train(ChunkId id) {
  ChunkSpec& spec = chunks_.at(static_cast<size_t>(id));
  spec.trainable = true;
  for (ParamId param : spec.params) params_[static_cast<size_t>(param)].trainable = true;
}

QuantizedPart Layout::quantized_part(ParamId id, void* array) const {
  const Placement& place = placement(id);
  const std::vector<ParamId>& params = chunk(place.chunk).params;
  const auto index = static_cast<int>(std::lower_bound(params.begin(), params.end(), id) - params.begin());
  return chunk(place.chunk).quantized_part(array, index, place.offset, shard_of(id));
}

ParamShard Layout::shard_of(ParamId id) const {
  const Placement& place = placement(id);
  const int64_t numel = param(id).numel;
  const int64_t first = shard_begin(place.chunk);
  const int64_t begin = std::clamp(first - place.offset, int64_t{0}, numel);
  const int64_t end = std::clamp(first + chunk(place.chunk).shard_numel - place.offset, int64_t{0}, numel);
  return {begin, end - begin, place.offset + begin - first};
}

}  // namespace patrickstar
