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

// NF4 super-block scales before a parameter: upper bound over the parameters ahead of it.
int64_t num_super_scales(int64_t numel, size_t num_params) {
  return numel / kNf4SuperBlock + static_cast<int64_t>(num_params);
}

int64_t quantized_bytes(const ChunkSpec& spec) {
  constexpr int64_t kFloat = sizeof(float);
  switch (spec.quantization) {
    case QuantType::kNone:
      return 0;
    case QuantType::kNf4:
      return spec.shard_numel / 2 + spec.shard_numel / kNf4Block +
             kFloat * (num_super_scales(spec.numel, spec.params.size()) + static_cast<int64_t>(spec.params.size()));
    case QuantType::kInt8:
      return spec.shard_numel + kFloat * (spec.shard_numel / kInt8Block);
  }
  return 0;
}

int64_t bytes_of(const ChunkSpec& spec, ArrayKind kind) {
  switch (kind) {
    case ArrayKind::kParam:
    case ArrayKind::kGrad:
      return spec.numel * element_size(spec.dtype);
    case ArrayKind::kParamShard:
    case ArrayKind::kGradShard:
      return spec.shard_numel * element_size(spec.dtype);
    case ArrayKind::kGradSum:
      return spec.shard_numel * element_size(DType::kFloat32);
    case ArrayKind::kMaster:
    case ArrayKind::kMomentum:
    case ArrayKind::kVariance:
      return state_bytes(spec.states.of(kind), spec.shard_numel);
    case ArrayKind::kQuantized:
      return quantized_bytes(spec);
  }
  return 0;
}

// Memory of a chunk's compute value and gradient. States and codes own memory on both tiers.
struct ValueRows {
  ArrayMemory param_on_host, param_on_device;
  Source source;
  ArrayMemory gradient_on_host, gradient_on_device;
};
constexpr ValueRows kFrozen{ArrayMemory::kOwn, ArrayMemory::kPassing, Source::kNone, ArrayMemory::kNone,
                            ArrayMemory::kNone};
constexpr ValueRows kQuantized{ArrayMemory::kPassing, ArrayMemory::kPassing, Source::kCodes, ArrayMemory::kNone,
                               ArrayMemory::kNone};
constexpr ValueRows kMasters{ArrayMemory::kOwn, ArrayMemory::kPassing, Source::kMaster, ArrayMemory::kShared,
                             ArrayMemory::kPassing};
// The compute value is part of the states.
constexpr ValueRows kCommitted{ArrayMemory::kOwn, ArrayMemory::kOwn, Source::kNone, ArrayMemory::kPassing,
                               ArrayMemory::kPassing};
constexpr ValueRows kInPlace{ArrayMemory::kOwn, ArrayMemory::kOwn, Source::kNone, ArrayMemory::kOwn,
                             ArrayMemory::kActivationMemory};
constexpr ValueRows kStochastic{ArrayMemory::kOwn, ArrayMemory::kOwn, Source::kNone, ArrayMemory::kOwn,
                                ArrayMemory::kOwn};

const ValueRows& value_rows_of(const ChunkSpec& spec) {
  if (spec.is_quantized()) return kQuantized;
  if (!spec.trainable) return kFrozen;
  if (!spec.keeps_param()) return kMasters;
  if (spec.states.gradient == GradientPlace::kOfParam) return kCommitted;
  return spec.puts_values_in_place() ? kInPlace : kStochastic;
}

ArrayRows rows_of(const ChunkSpec& spec) {
  const ArrayKind param = spec.param_resting_tier();
  const ArrayKind gradient = spec.grad_resting_tier();
  ArrayRows rows(param, gradient, spec.is_quantized() ? ArrayKind::kQuantized : param);
  for (int kind = 0; kind < kNumArrayKinds; ++kind) {
    ArrayRow& row = rows[static_cast<ArrayKind>(kind)];
    row.kind = row.shares_with = static_cast<ArrayKind>(kind);
    row.num_bytes = bytes_of(spec, row.kind);
  }
  const auto set = [&rows](ArrayKind kind, ArrayMemory on_host, ArrayMemory on_device) {
    rows[kind].on_host = on_host;
    rows[kind].on_device = on_device;
  };
  const ValueRows& found = value_rows_of(spec);
  if (spec.is_sharded()) {
    set(ArrayKind::kParam, ArrayMemory::kPassing, ArrayMemory::kPassing);
    rows[ArrayKind::kParam].source = Source::kOtherRanks;
  }
  set(param, found.param_on_host, found.param_on_device);
  rows[param].source = found.source;
  if (spec.is_quantized()) set(ArrayKind::kQuantized, ArrayMemory::kOwn, ArrayMemory::kOwn);
  if (spec.trainable) {
    for (ArrayKind kind : spec.state_kinds()) set(kind, ArrayMemory::kOwn, ArrayMemory::kOwn);
    for (ArrayKind kind : {ArrayKind::kGrad, ArrayKind::kGradSum})
      set(kind, ArrayMemory::kPassing, ArrayMemory::kPassing);
    set(gradient, found.gradient_on_host, found.gradient_on_device);
  }
  if (found.gradient_on_host == ArrayMemory::kShared) {
    rows[param].shares_with = gradient;
    rows[gradient].shares_with = param;
  }
  return rows;
}

}  // namespace

static_assert(kShardAlignment % kQuantAlignment == 0 && kQuantAlignment % kNf4Block == 0 &&
              kQuantAlignment % kInt8Block == 0);

ChunkRanks ChunkRanks::of_parts(int count) {
  PS_CHECK(count > 0, ArgumentError, "a parameter is to be divided into ", count, " parts; give 1 or more");
  return ChunkRanks(count);
}

Sharding ChunkRanks::among(const Sharding& engine, const std::string& what) const {
  PS_CHECK(engine.num_ranks % num_parts_ == 0, ArgumentError, what, " is to be divided into ", num_parts_,
           " parts, but there are ", engine.num_ranks, " ranks; give a number that divides them");
  return {engine.num_ranks / num_parts_, engine.rank / num_parts_};
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

Layout Layout::pack(const std::vector<ParamSpec>& params, int64_t chunk_numel, Sharding ranks) {
  PS_CHECK(ranks.num_ranks >= 1 && ranks.rank >= 0 && ranks.rank < ranks.num_ranks, ArgumentError, "rank ", ranks.rank,
           " of ", ranks.num_ranks, " ranks: give a rank from 0 to one less than their number");
  PS_CHECK(chunk_numel >= kAlignment, ArgumentError, "default_chunk_size is ", chunk_numel, " elements, the least is ",
           kAlignment, "; choose 64 * 1024 or more");
  Layout layout;
  layout.chunk_numel_ = chunk_numel;
  layout.ranks_ = ranks;
  layout.params_ = params;
  for (ParamSpec& param : layout.params_) {
    // a frozen quantised parameter never has states
    if (param.quantization != QuantType::kNone && !param.trainable) param.states = {};
  }
  layout.placements_.resize(params.size());
  std::map<std::tuple<DType, bool, StateFormat, QuantType, int>, ChunkId> open;  // chunk being filled, by class
  for (size_t id = 0; id < params.size(); ++id) {
    const ParamSpec& param = layout.params_[id];
    PS_CHECK(param.numel > 0, ArgumentError, "parameter ", id, " has ", param.numel, " elements; it needs at least 1");
    const bool is_whole = param.states.master == StateType::kFloat32;
    PS_CHECK(is_whole || param.dtype == DType::kBFloat16, ArgumentError, "parameter ", id, " is ",
             dtype_name(param.dtype), ", and only masters of bfloat16 values are split or left out; give it a float32 ",
             "master");
    PS_CHECK(param.quantization == QuantType::kNone || !param.trainable, ArgumentError, "parameter ", id,
             " is trained and was to be quantised; only frozen parameters can be");
    const Sharding sharding = param.ranks.among(ranks, "parameter " + std::to_string(id));
    const int64_t need = rounded_up(param.numel, alignment_of(param, sharding));
    const auto key =
        std::make_tuple(param.dtype, param.trainable, param.states, param.quantization, sharding.num_ranks);
    auto found = open.find(key);
    const bool fits = found != open.end() && layout.chunk(found->second).numel + need <= chunk_numel;
    ChunkId chunk;
    if (fits) {
      chunk = found->second;
    } else {
      chunk = layout.num_chunks();
      layout.chunks_.push_back(
          {0, 0, param.dtype, param.trainable, {}, param.states, param.quantization, sharding, {}});
      // An oversized parameter does not close the current chunk, which smaller ones may still fill.
      if (need <= chunk_numel) open[key] = chunk;
    }
    ChunkSpec& spec = layout.chunks_[static_cast<size_t>(chunk)];
    layout.placements_[id] = {chunk, spec.numel};
    spec.numel += need;
    spec.params.push_back(static_cast<ParamId>(id));
  }
  for (ChunkSpec& spec : layout.chunks_) {
    if (spec.is_sharded()) spec.numel = rounded_up(spec.numel, spec.sharding.num_ranks * kShardAlignment);
    spec.shard_numel = spec.numel / spec.sharding.num_ranks;
    spec.rows = rows_of(spec);
  }
  return layout;
}

void Layout::train(ChunkId id) {
  ChunkSpec& spec = chunks_.at(static_cast<size_t>(id));
  spec.trainable = true;
  spec.rows = rows_of(spec);
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
