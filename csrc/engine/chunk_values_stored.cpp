// Values of parameters whose states are split or compressed (engine/chunk_values.h).
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "engine/chunk_values.h"

namespace patrickstar {

namespace {

constexpr int64_t kStagedNumel = int64_t{4} << 20;  // staged per call of all threads; not measured

struct SplitPiece {
  explicit SplitPiece(int64_t param_numel)
      : values(static_cast<size_t>(std::min(kPieceNumel, param_numel))),
        param(values.size()),
        lower(values.size()),
        variance(values.size()) {}

  std::vector<float> values;
  std::vector<uint16_t> param;
  std::vector<uint16_t> lower;
  std::vector<float> variance;
};

int64_t half_bytes(int64_t numel) { return numel * static_cast<int64_t>(sizeof(uint16_t)); }

}  // namespace

void ChunkValues::write_split(ParamId param, ArrayKind kind, ParamValues values, Tier resting_tier) {
  const Layout& layout = store_.layout();
  const ChunkId chunk = layout.placement(param).chunk;
  const ParamShard shard = layout.shard_of(param);
  make_kept_param(chunk, resting_tier);
  const bool is_on_host = !memory_.array(layout.param_resting_tier(chunk)).on_device;
  if (kind == ArrayKind::kMaster && is_on_host) return split_in_place(chunk, shard, values);
  const bool lends_sign = layout.chunk(chunk).is_in_split(ArrayKind::kVariance);
  SplitPiece piece(shard.numel);
  float* signs = lends_sign ? piece.variance.data() : nullptr;
  for (int64_t begin = 0; begin < shard.numel; begin += kPieceNumel) {
    const int64_t numel = std::min(kPieceNumel, shard.numel - begin);
    const int64_t first = shard.offset + begin;
    const ArrayId variance{chunk, ArrayKind::kVariance};
    bytes_.copy_to_host(piece.values.data(), {values.data + begin, values.where}, float_bytes(numel));
    if (lends_sign) bytes_.read(variance, float_bytes(first), signs, float_bytes(numel));
    if (kind == ArrayKind::kVariance) {
      for (size_t i = 0; i < static_cast<size_t>(numel); ++i) {
        piece.variance[i] = std::copysign(piece.values[i], piece.variance[i]);
      }
    } else {
      memory_.host_compute().split_master(piece.values.data(), piece.param.data(), piece.lower.data(), signs, numel);
      bytes_.write(layout.param_resting_tier(chunk), half_bytes(first), {piece.param.data(), Tier::kHost},
                   half_bytes(numel));
      bytes_.write({chunk, ArrayKind::kMaster}, half_bytes(first), {piece.lower.data(), Tier::kHost},
                   half_bytes(numel));
    }
    if (lends_sign) bytes_.write(variance, float_bytes(first), {signs, Tier::kHost}, float_bytes(numel));
  }
}

// Splits a master whose arrays are in host memory, with all threads.
void ChunkValues::split_in_place(ChunkId chunk, const ParamShard& shard, ParamValues values) {
  const Layout& layout = store_.layout();
  const auto place = [&](ArrayKind kind) {
    const ArrayId id{chunk, kind};
    pager_.bring_to_host(id);
    memory_.array(id).set_on_host();
    return memory_.array(id).block.data;
  };
  const bool lends_sign = layout.chunk(chunk).is_in_split(ArrayKind::kVariance);
  uint16_t* param = static_cast<uint16_t*>(place(layout.chunk(chunk).param_resting_tier())) + shard.offset;
  uint16_t* lower = static_cast<uint16_t*>(place(ArrayKind::kMaster)) + shard.offset;
  float* variance = lends_sign ? static_cast<float*>(place(ArrayKind::kVariance)) + shard.offset : nullptr;
  const bool is_staged = values.where == Tier::kDevice;
  const int64_t most = is_staged ? std::min(kStagedNumel, shard.numel) : shard.numel;
  std::vector<float> staged(static_cast<size_t>(is_staged ? most : 0));
  for (int64_t begin = 0; begin < shard.numel; begin += most) {
    const int64_t numel = std::min(most, shard.numel - begin);
    const float* master = values.data + begin;
    if (is_staged) {
      bytes_.copy_to_host(staged.data(), {master, values.where}, float_bytes(numel));
      master = staged.data();
    }
    memory_.host_compute().split_master(master, param + begin, lower + begin,
                                        variance == nullptr ? nullptr : variance + begin, numel);
  }
}

bool ChunkValues::join_in_place(ChunkId chunk, const ParamShard& shard, ArrayKind kind, float* values) {
  const ChunkSpec& spec = store_.layout().chunk(chunk);
  const bool lends_sign = spec.is_in_split(ArrayKind::kVariance);
  const char* const variance = lends_sign ? readable({chunk, ArrayKind::kVariance}) : nullptr;
  if (lends_sign && variance == nullptr) return false;
  const float* signs = lends_sign ? reinterpret_cast<const float*>(variance) + shard.offset : nullptr;
  if (kind == ArrayKind::kVariance) {
    memory_.device().pool().parallel_for(shard.numel, kPieceNumel, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) values[i] = std::fabs(signs[i]);
    });
    return true;
  }
  const char* const param = readable({chunk, spec.param_resting_tier()});
  const char* const lower = readable({chunk, ArrayKind::kMaster});
  if (param == nullptr || lower == nullptr) return false;
  const auto half = [&shard](const char* array) { return reinterpret_cast<const uint16_t*>(array) + shard.offset; };
  memory_.host_compute().join_master(half(param), half(lower), signs, values, shard.numel);
  return true;
}

void ChunkValues::read_split(ParamId param, ArrayKind kind, float* values) {
  const Layout& layout = store_.layout();
  const ChunkId chunk = layout.placement(param).chunk;
  const ParamShard shard = layout.shard_of(param);
  if (join_in_place(chunk, shard, kind, values)) return;
  const bool lends_sign = layout.chunk(chunk).is_in_split(ArrayKind::kVariance);
  SplitPiece piece(shard.numel);
  float* signs = lends_sign ? piece.variance.data() : nullptr;
  for (int64_t begin = 0; begin < shard.numel; begin += kPieceNumel) {
    const int64_t numel = std::min(kPieceNumel, shard.numel - begin);
    const int64_t first = shard.offset + begin;
    if (lends_sign) bytes_.read({chunk, ArrayKind::kVariance}, float_bytes(first), signs, float_bytes(numel));
    if (kind == ArrayKind::kVariance) {
      for (int64_t i = 0; i < numel; ++i) values[begin + i] = std::fabs(piece.variance[static_cast<size_t>(i)]);
      continue;
    }
    bytes_.read(layout.param_resting_tier(chunk), half_bytes(first), piece.param.data(), half_bytes(numel));
    bytes_.read({chunk, ArrayKind::kMaster}, half_bytes(first), piece.lower.data(), half_bytes(numel));
    memory_.host_compute().join_master(piece.param.data(), piece.lower.data(), signs, values + begin, numel);
  }
}

void ChunkValues::write_bare(ParamId param, ParamValues values, Tier resting_tier) {
  const Layout& layout = store_.layout();
  const ChunkId chunk = layout.placement(param).chunk;
  const ParamShard shard = layout.shard_of(param);
  const DType dtype = layout.chunk(chunk).dtype;
  make_kept_param(chunk, resting_tier);
  SplitPiece piece(shard.numel);
  for (int64_t begin = 0; begin < shard.numel; begin += kPieceNumel) {
    const int64_t numel = std::min(kPieceNumel, shard.numel - begin);
    bytes_.copy_to_host(piece.values.data(), {values.data + begin, values.where}, float_bytes(numel));
    memory_.host_compute().cast_from_float(piece.values.data(), piece.param.data(), dtype, numel);
    bytes_.write(layout.param_resting_tier(chunk), half_bytes(shard.offset + begin), {piece.param.data(), Tier::kHost},
                 half_bytes(numel));
  }
}

// Storing what read_compressed() returned restores the same bits.
void ChunkValues::write_compressed(ParamId param, ArrayKind kind, ParamValues values) {
  const Layout& layout = store_.layout();
  const ArrayId id{layout.placement(param).chunk, kind};
  const ChunkSpec& spec = layout.chunk(id.chunk);
  const StateType type = spec.states.of(kind);
  const ParamShard shard = layout.shard_of(param);
  std::vector<float> piece(static_cast<size_t>(std::min(kPieceNumel, shard.numel)));
  std::vector<char> stored(static_cast<size_t>(state_bytes(type, static_cast<int64_t>(piece.size()))));
  std::vector<float> scales(static_cast<size_t>(num_state_blocks(static_cast<int64_t>(piece.size()))));
  for (int64_t begin = 0; begin < shard.numel; begin += kPieceNumel) {
    const int64_t numel = std::min(kPieceNumel, shard.numel - begin);
    const int64_t first = shard.offset + begin;
    bytes_.copy_to_host(piece.data(), {values.data + begin, values.where}, float_bytes(numel));
    memory_.host_compute().compress_state(piece.data(), type, stored.data(), scales.data(), numel,
                                          {0, 0, shard.begin + begin});
    bytes_.write(id, state_offset(type, first), {stored.data(), Tier::kHost}, state_offset(type, numel));
    if (!is_8_bit(type)) continue;
    bytes_.write(id, scales_offset(spec.shard_numel, first), {scales.data(), Tier::kHost},
                 float_bytes(num_state_blocks(numel)));
  }
}

void ChunkValues::read_compressed(ParamId param, ArrayKind kind, float* values) {
  const Layout& layout = store_.layout();
  const ArrayId id{layout.placement(param).chunk, kind};
  const ChunkSpec& spec = layout.chunk(id.chunk);
  const StateType type = spec.states.of(kind);
  const ParamShard shard = layout.shard_of(param);
  if (char* const array = readable(id)) {
    const StatePlace state = spec.state_place(kind, array, shard.offset);
    memory_.host_compute().expand_state(type, state.data, state.scales, values, shard.numel);
    return;
  }
  const int64_t most = std::min(kPieceNumel, shard.numel);
  std::vector<char> stored(static_cast<size_t>(state_bytes(type, most)));
  std::vector<float> scales(static_cast<size_t>(num_state_blocks(most)));
  for (int64_t begin = 0; begin < shard.numel; begin += kPieceNumel) {
    const int64_t numel = std::min(kPieceNumel, shard.numel - begin);
    const int64_t first = shard.offset + begin;
    bytes_.read(id, state_offset(type, first), stored.data(), state_offset(type, numel));
    if (is_8_bit(type)) {
      bytes_.read(id, scales_offset(spec.shard_numel, first), scales.data(), float_bytes(num_state_blocks(numel)));
    }
    memory_.host_compute().expand_state(type, stored.data(), scales.data(), values + begin, numel);
  }
}

}  // namespace patrickstar
