#include "engine/chunk_values.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "common/check.h"

namespace patrickstar {

namespace {

ParamValues part(ParamValues values, const ParamShard& shard) {
  values.data += shard.begin;
  return values;
}

}  // namespace

void ChunkValues::write(ParamId param, ArrayKind kind, ParamValues values, Tier resting_tier) {
  const Layout& layout = store_.layout();
  const ChunkId chunk = layout.placement(param).chunk;
  const ChunkSpec& spec = layout.chunk(chunk);
  const bool in_use = kind == ArrayKind::kMaster && is_in_use(chunk);
  PS_CHECK(!in_use || !spec.is_quantized(), StateError, store_.param_name(param),
           " is quantised, and cannot be written while a module that uses it runs; write it between steps");
  if (spec.is_quantized()) return write_quantized(param, values);
  write_own(param, kind, part(values, layout.shard_of(param)), resting_tier);
  if (in_use) replace_in_use(param, values);
}

void ChunkValues::write_own(ParamId param, ArrayKind kind, ParamValues values, Tier resting_tier) {
  const Layout& layout = store_.layout();
  const ChunkId chunk = layout.placement(param).chunk;
  const ParamShard shard = layout.shard_of(param);
  const ChunkSpec& spec = layout.chunk(chunk);
  if (!spec.trainable) return write_cast(param, layout.param_resting_tier(chunk), values);
  if (spec.is_in_split(kind)) return write_split(param, kind, values, resting_tier);
  if (kind == ArrayKind::kMaster && !spec.states.has(kind)) return write_bare(param, values, resting_tier);
  pager_.ensure_state({chunk, kind}, resting_tier);
  if (spec.states.of(kind) != StateType::kFloat32) return write_compressed(param, kind, values);
  bytes_.write({chunk, kind}, float_bytes(shard.offset), {values.data, values.where}, float_bytes(shard.numel));
  if (kind == ArrayKind::kMaster) discard_compute_values(chunk);
}

// Operations and autograd's saved views read the device buffer, so the whole new values are written into it, on every
// rank.
void ChunkValues::replace_in_use(ParamId param, ParamValues values) {
  const Layout& layout = store_.layout();
  const Placement& placement = layout.placement(param);
  const DType dtype = layout.chunk(placement.chunk).dtype;
  const int64_t total = layout.param(param).numel;
  std::vector<float> staged(static_cast<size_t>(std::min(kPieceNumel, total)));
  std::vector<char> rounded(staged.size() * static_cast<size_t>(element_size(dtype)));
  for (int64_t begin = 0; begin < total; begin += kPieceNumel) {
    const int64_t numel = std::min(kPieceNumel, total - begin);
    bytes_.copy_to_host(staged.data(), {values.data + begin, values.where}, float_bytes(numel));
    memory_.host_compute().cast_from_float(staged.data(), rounded.data(), dtype, numel);
    bytes_.enqueue_to_device_buffer({placement.chunk, ArrayKind::kParam},
                                    (placement.offset + begin) * element_size(dtype), rounded.data(),
                                    numel * element_size(dtype));
    memory_.backend().synchronize(memory_.backend().record(Queue::kCompute));
  }
  memory_.present_param(Queue::kCompute, param);
}

void ChunkValues::write_quantized(ParamId param, ParamValues values) {
  if (values.where == Tier::kHost) return quantized_.write(param, values.data);
  std::vector<float> staged(static_cast<size_t>(store_.layout().param(param).numel));
  bytes_.copy_to_host(staged.data(), {values.data, values.where}, float_bytes(static_cast<int64_t>(staged.size())));
  quantized_.write(param, staged.data());
}

// Moves the compute value to the tier of the leading state and drops other copies. A value in use stays where it is.
void ChunkValues::make_kept_param(ChunkId chunk, Tier resting_tier) {
  if (is_in_use(chunk)) return;
  const ArrayId param = store_.layout().param_resting_tier(chunk);
  const ChunkSpec& spec = store_.chunk(chunk);
  if (memory_.array({chunk, spec.leading_state()}).exists()) {
    resting_tier = store_.has_states_on_device(chunk) ? Tier::kDevice : Tier::kHost;
  }
  pager_.ensure_state({chunk, spec.leading_state()}, resting_tier);
  if (spec.is_in_split(ArrayKind::kVariance)) pager_.ensure_state({chunk, ArrayKind::kVariance}, resting_tier);
  pager_.ensure_state(param, resting_tier);
  if (spec.is_sharded()) memory_.discard({chunk, ArrayKind::kParam});
  if (resting_tier == Tier::kDevice) {
    pager_.bring(param);
    memory_.drop_host_buffer(param);
  } else {
    pager_.bring_to_host(param);
    memory_.drop_device_buffer(param);
  }
}

void ChunkValues::make_stored(ArrayId id, Tier resting_tier) {
  const bool derives = store_.chunk(id.chunk).rows.param().source == Source::kMaster;
  if (!derives) make_kept_param(id.chunk, resting_tier);
  if (id != store_.layout().param_resting_tier(id.chunk)) pager_.ensure_state(id, resting_tier);
  if (derives && id.kind == ArrayKind::kMaster) discard_compute_values(id.chunk);
}

void ChunkValues::write_stored(ArrayId id, int64_t offset_bytes, ParamBytes from, int64_t num_bytes) {
  ArrayRecord& record = memory_.array(id);
  if (!record.on_device || num_bytes == 0) {
    if (num_bytes > 0) bytes_.write(id, offset_bytes, from, num_bytes);
    return;
  }
  bytes_.enqueue_to_device_buffer(id, offset_bytes, from.data, num_bytes);
  record.set_on_device();
}

bool ChunkValues::is_in_use(ChunkId chunk) const { return memory_.array({chunk, ArrayKind::kParam}).holds > 0; }

// A chunk in use keeps its device buffer: replace_in_use() writes the new values there.
void ChunkValues::discard_compute_values(ChunkId chunk) {
  const ArrayId param{chunk, ArrayKind::kParam};
  is_in_use(chunk) ? memory_.drop_host_buffer(param) : memory_.discard(param);
  if (store_.chunk(chunk).is_sharded()) memory_.discard({chunk, ArrayKind::kParamShard});
}

void ChunkValues::write_cast(ParamId param, ArrayId id, ParamValues values) {
  const Layout& layout = store_.layout();
  const ParamShard shard = layout.shard_of(param);
  const DType dtype = layout.chunk(id.chunk).dtype;
  ArrayRecord& record = memory_.array(id);
  const bool in_use = is_in_use(id.chunk);
  const bool holds_device_buffer = in_use && id.kind == ArrayKind::kParam;
  if (holds_device_buffer && !record.on_host) return;  // replace_in_use() writes it
  if (record.exists()) {
    pager_.bring_to_host(id);
  } else {
    pager_.ensure_host_buffer(id);
  }
  if (shard.numel > 0) {
    char* const data = element_at(record.block.data, shard.offset, dtype);
    std::vector<float> staged(values.where == Tier::kDevice ? static_cast<size_t>(std::min(kPieceNumel, shard.numel))
                                                            : 0);
    const int64_t most = staged.empty() ? shard.numel : static_cast<int64_t>(staged.size());
    for (int64_t begin = 0; begin < shard.numel; begin += most) {
      const int64_t numel = std::min(most, shard.numel - begin);
      const float* from = values.data + begin;
      if (!staged.empty()) {
        bytes_.copy_to_host(staged.data(), {from, values.where}, float_bytes(numel));
        from = staged.data();
      }
      memory_.host_compute().cast_from_float(from, data + begin * element_size(dtype), dtype, numel);
    }
  }
  if (holds_device_buffer) return;
  memory_.drop_device_buffer(id);
  record.set_on_host();
  if (!store_.chunk(id.chunk).trainable && store_.resting_tier(id.chunk) == Tier::kDevice) settle_on_device(id);
  if (id.kind == ArrayKind::kParamShard && !in_use) memory_.discard({id.chunk, ArrayKind::kParam});
}

// The host has no reserved memory for a frozen value whose resting tier is the device; it was staged there to be
// written.
void ChunkValues::settle_on_device(ArrayId id) {
  if (store_.chunk(id.chunk).is_sharded()) return;
  pager_.bring(id);
  memory_.drop_host_buffer(id);
}

void ChunkValues::read(ParamId param, ArrayKind kind, float* values) {
  const Layout& layout = store_.layout();
  read_own(param, kind, values + layout.shard_of(param).begin);
  gather(param, values);
}

void ChunkValues::read_own(ParamId param, ArrayKind kind, float* values) {
  const Layout& layout = store_.layout();
  if (layout.chunk(layout.placement(param).chunk).trainable) return read_state(param, kind, values);
  PS_CHECK(kind == ArrayKind::kMaster, ArgumentError, store_.param_name(param), " is frozen and has no ",
           array_kind_name(kind));
  if (layout.chunk(layout.placement(param).chunk).is_quantized()) return quantized_.read(param, values);
  read_cast(param, layout.param_resting_tier(layout.placement(param).chunk), values);
}

char* ChunkValues::readable(ArrayId id) {
  const ArrayRecord& record = memory_.array(id);
  if (store_.resting_tier(id.chunk) == Tier::kDisk || (record.on_device && !record.on_host)) return nullptr;
  pager_.bring_to_host(id);
  return static_cast<char*>(record.block.data);
}

void ChunkValues::read_state(ParamId param, ArrayKind kind, float* values) {
  const Layout& layout = store_.layout();
  const ArrayId id{layout.placement(param).chunk, kind};
  const ParamShard shard = layout.shard_of(param);
  if (shard.numel == 0) return;
  if (kind == ArrayKind::kMaster && !layout.chunk(id.chunk).states.has(kind)) {
    read_cast(param, layout.param_resting_tier(id.chunk), values);
  } else if (!memory_.array(id).exists()) {  // a state before the first step
    std::memset(values, 0, static_cast<size_t>(float_bytes(shard.numel)));
  } else if (layout.chunk(id.chunk).is_in_split(kind)) {
    read_split(param, kind, values);
  } else if (kind != ArrayKind::kGradSum && layout.chunk(id.chunk).states.of(kind) != StateType::kFloat32) {
    read_compressed(param, kind, values);
  } else {
    bytes_.read(id, float_bytes(shard.offset), values, float_bytes(shard.numel));
  }
}

void ChunkValues::read_cast(ParamId param, ArrayId id, float* values) {
  const Layout& layout = store_.layout();
  const ParamShard shard = layout.shard_of(param);
  const DType dtype = layout.chunk(id.chunk).dtype;
  const int64_t offset = shard.offset * element_size(dtype);
  const ArrayRecord& record = memory_.array(id);
  if (record.on_device && !record.on_host) {
    std::vector<char> rounded(static_cast<size_t>(shard.numel * element_size(dtype)));
    bytes_.read(id, offset, rounded.data(), static_cast<int64_t>(rounded.size()));
    return memory_.host_compute().cast_to_float(rounded.data(), dtype, values, shard.numel);
  }
  pager_.bring_to_host(id);
  if (shard.numel == 0) return;
  memory_.host_compute().cast_to_float(static_cast<const char*>(record.block.data) + offset, dtype, values,
                                       shard.numel);
}

void ChunkValues::round_master(ParamId param) {
  const Layout& layout = store_.layout();
  const ChunkId chunk = layout.placement(param).chunk;
  const DType dtype = layout.chunk(chunk).dtype;
  const ParamShard shard = layout.shard_of(param);
  if (dtype == DType::kFloat32) return;
  std::vector<float> values(static_cast<size_t>(shard.numel));
  std::vector<char> rounded(static_cast<size_t>(shard.numel * element_size(dtype)));
  read_state(param, ArrayKind::kMaster, values.data());
  memory_.host_compute().cast_from_float(values.data(), rounded.data(), dtype, shard.numel);
  memory_.host_compute().cast_to_float(rounded.data(), dtype, values.data(), shard.numel);
  write(param, ArrayKind::kMaster, {values.data() - shard.begin, Tier::kHost}, Tier::kHost);
}

void ChunkValues::read_gradient(ParamId param, ArrayKind source, float* values) {
  const Layout& layout = store_.layout();
  const ArrayId id{layout.placement(param).chunk, source};
  float* own = values + layout.shard_of(param).begin;
  if (source == ArrayKind::kGradSum) {
    read_state(param, source, own);
  } else {
    read_cast(param, id, own);
  }
  gather(param, values);
}

void ChunkValues::write_gradient(ParamId param, ArrayKind source, ParamValues values) {
  const Layout& layout = store_.layout();
  const ArrayId id{layout.placement(param).chunk, source};
  const ParamShard shard = layout.shard_of(param);
  values = part(values, shard);
  if (source != ArrayKind::kGradSum) return write_cast(param, id, values);
  pager_.bring_to_host(id);
  bytes_.copy_to_host(static_cast<float*>(memory_.array(id).block.data) + shard.offset, {values.data, values.where},
                      float_bytes(shard.numel));
  memory_.drop_device_buffer(id);
  memory_.array(id).set_on_host();
}

// Exchanges the shards of all ranks that share the parameter's chunk.
void ChunkValues::gather(ParamId param, float* values) {
  const ChunkSpec& chunk = store_.chunk(store_.layout().placement(param).chunk);
  if (!chunk.is_sharded()) return;
  const ParamShard mine = store_.layout().shard_of(param);
  const auto bytes = [](int64_t numel) { return static_cast<size_t>(numel) * sizeof(float); };
  const std::string part(reinterpret_cast<const char*>(values + mine.begin), bytes(mine.numel));
  const std::string what = "values of " + store_.param_name(param);
  const std::vector<std::string> parts = collectives_.exchange_shards(what, part, chunk.sharding);
  size_t total = 0;
  for (const std::string& from_rank : parts) total += from_rank.size();
  PS_CHECK(total == bytes(store_.layout().param(param).numel), StateError, what, ": the ranks' parts have ", total,
           " bytes, the parameter ", bytes(store_.layout().param(param).numel), "; report this");
  char* to = reinterpret_cast<char*>(values);
  for (const std::string& from_rank : parts) {
    std::memcpy(to, from_rank.data(), from_rank.size());
    to += from_rank.size();
  }
}

}  // namespace patrickstar
