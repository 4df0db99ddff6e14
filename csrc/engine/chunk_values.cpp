#include "engine/chunk_values.h"

#include <cstring>
#include <string>
#include <vector>

#include "common/check.h"

namespace patrickstar {

namespace {

constexpr int64_t kCopyGrain = int64_t{4} << 20;  // bytes

ParamValues part(ParamValues values, const ParamShard& shard) {
  values.data += shard.begin;
  return values;
}

}  // namespace

void ChunkValues::write(ParamId param, ArrayKind kind, ParamValues values, Tier home) {
  const Layout& layout = store_.layout();
  const ChunkId chunk = layout.placement(param).chunk;
  const ParamShard shard = layout.shard_of(param);
  PS_CHECK(memory_.array({chunk, ArrayKind::kParam}).holds == 0, StateError, store_.param_name(param),
           " cannot be written while a module that uses it runs; write it between steps");
  values = part(values, shard);
  if (!layout.chunk(chunk).trainable) return write_cast(param, {chunk, layout.param_home()}, values);
  const ArrayId id{chunk, kind};
  pager_.ensure_state(id, home);
  ArrayRecord& record = memory_.array(id);
  const int64_t num_bytes = shard.numel * static_cast<int64_t>(sizeof(float));
  if (record.on_device) {
    memory_.await_on_device(id);
    if (num_bytes > 0) {
      memory_.backend().copy(Queue::kCompute, static_cast<float*>(record.slot.data) + shard.offset, values.data,
                             num_bytes);
    }
    memory_.backend().synchronize(memory_.backend().record(Queue::kCompute));
    record.set_on_device();
  } else {
    pager_.bring_to_host(id);
    copy_to_host(static_cast<float*>(record.block.data) + shard.offset, values, num_bytes);
    record.set_on_host();
  }
  if (kind == ArrayKind::kMaster) discard_compute_values(chunk);
}

void ChunkValues::discard_compute_values(ChunkId chunk) {
  memory_.discard({chunk, ArrayKind::kParam});
  if (store_.layout().is_sharded()) memory_.discard({chunk, ArrayKind::kParamShard});
}

void ChunkValues::copy_to_host(void* to, ParamValues values, int64_t num_bytes) {
  if (values.where == Tier::kDevice) {
    memory_.backend().copy(Queue::kCompute, to, values.data, num_bytes);
    memory_.backend().synchronize(memory_.backend().record(Queue::kCompute));
    return;
  }
  memory_.device().pool().parallel_for(num_bytes, kCopyGrain, [&](int64_t begin, int64_t end) {
    std::memcpy(static_cast<char*>(to) + begin, reinterpret_cast<const char*>(values.data) + begin,
                static_cast<size_t>(end - begin));
  });
}

void ChunkValues::write_cast(ParamId param, ArrayId id, ParamValues values) {
  const Layout& layout = store_.layout();
  const ParamShard shard = layout.shard_of(param);
  const DType dtype = layout.chunk(id.chunk).dtype;
  ArrayRecord& record = memory_.array(id);
  if (record.exists()) {
    pager_.bring_to_host(id);
  } else {
    pager_.ensure_block(id);
  }
  if (shard.numel > 0) {
    void* data = static_cast<char*>(record.block.data) + shard.offset * element_size(dtype);
    std::vector<float> staged;
    if (values.where == Tier::kDevice) {
      staged.resize(static_cast<size_t>(shard.numel));
      copy_to_host(staged.data(), values, shard.numel * static_cast<int64_t>(sizeof(float)));
      values.data = staged.data();
    }
    memory_.host_compute().cast_from_float(values.data, data, dtype, shard.numel);
  }
  memory_.drop_slot(id);
  record.set_on_host();
  if (!store_.chunk(id.chunk).trainable && store_.home(id.chunk) == Tier::kDevice) settle_on_device(id);
  if (id.kind == ArrayKind::kParamShard) memory_.discard({id.chunk, ArrayKind::kParam});
}

// [Note: homes on the host] A frozen value that the host has no memory for was a guest there.
void ChunkValues::settle_on_device(ArrayId id) {
  if (store_.layout().is_sharded()) return;
  pager_.bring(id);
  memory_.drop_block(id);
}

void ChunkValues::read(ParamId param, ArrayKind kind, float* values) {
  const Layout& layout = store_.layout();
  read_own(param, kind, values + layout.shard_of(param).begin);
  if (layout.is_sharded()) gather(param, values);
}

void ChunkValues::read_own(ParamId param, ArrayKind kind, float* values) {
  const Layout& layout = store_.layout();
  if (layout.chunk(layout.placement(param).chunk).trainable) return read_state(param, kind, values);
  PS_CHECK(kind == ArrayKind::kMaster, ArgumentError, store_.param_name(param), " is frozen and has no ",
           array_kind_name(kind));
  read_cast(param, {layout.placement(param).chunk, layout.param_home()}, values);
}

void ChunkValues::read_state(ParamId param, ArrayKind kind, float* values) {
  const Layout& layout = store_.layout();
  const ArrayId id{layout.placement(param).chunk, kind};
  const ParamShard shard = layout.shard_of(param);
  const ArrayRecord& record = memory_.array(id);
  const int64_t num_bytes = shard.numel * static_cast<int64_t>(sizeof(float));
  if (num_bytes == 0) return;
  if (!record.exists()) {  // a moment before the first step
    std::memset(values, 0, static_cast<size_t>(num_bytes));
  } else if (record.on_device) {
    copy_from_device(id, shard.offset * static_cast<int64_t>(sizeof(float)), values, num_bytes);
  } else {
    pager_.bring_to_host(id);
    std::memcpy(values, static_cast<const float*>(record.block.data) + shard.offset, static_cast<size_t>(num_bytes));
  }
}

void ChunkValues::copy_from_device(ArrayId id, int64_t offset_bytes, void* to, int64_t num_bytes) {
  memory_.await_on_device(id);
  memory_.backend().wait(Queue::kDownload, memory_.backend().record(Queue::kCompute));
  memory_.backend().copy(Queue::kDownload, to, static_cast<const char*>(memory_.array(id).slot.data) + offset_bytes,
                         num_bytes);
  memory_.backend().synchronize(memory_.backend().record(Queue::kDownload));
}

void ChunkValues::read_cast(ParamId param, ArrayId id, float* values) {
  const Layout& layout = store_.layout();
  const ParamShard shard = layout.shard_of(param);
  const DType dtype = layout.chunk(id.chunk).dtype;
  const int64_t offset = shard.offset * element_size(dtype);
  const ArrayRecord& record = memory_.array(id);
  if (record.on_device && !record.on_host) {
    std::vector<char> rounded(static_cast<size_t>(shard.numel * element_size(dtype)));
    copy_from_device(id, offset, rounded.data(), static_cast<int64_t>(rounded.size()));
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
  if (layout.is_sharded()) gather(param, values);
}

void ChunkValues::write_gradient(ParamId param, ArrayKind source, ParamValues values) {
  const Layout& layout = store_.layout();
  const ArrayId id{layout.placement(param).chunk, source};
  const ParamShard shard = layout.shard_of(param);
  values = part(values, shard);
  if (source != ArrayKind::kGradSum) return write_cast(param, id, values);
  pager_.bring_to_host(id);
  const int64_t num_bytes = shard.numel * static_cast<int64_t>(sizeof(float));
  copy_to_host(static_cast<float*>(memory_.array(id).block.data) + shard.offset, values, num_bytes);
  memory_.drop_slot(id);
  memory_.array(id).set_on_host();
}

// Each rank's part comes from that rank.
void ChunkValues::gather(ParamId param, float* values) {
  const ParamShard mine = store_.layout().shard_of(param);
  const auto bytes = [](int64_t numel) { return static_cast<size_t>(numel) * sizeof(float); };
  const std::string part(reinterpret_cast<const char*>(values + mine.begin), bytes(mine.numel));
  const std::string what = "values of " + store_.param_name(param);
  const std::vector<std::string> parts = collectives_.exchange(what, part);
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
