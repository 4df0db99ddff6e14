#include "runtime/chunk_values.h"

#include <cstring>
#include <vector>

#include "common/check.h"

namespace patrickstar {

namespace {

constexpr int64_t kCopyGrain = int64_t{4} << 20;  // bytes

}  // namespace

void ChunkValues::write(ParamId param, ArrayKind kind, ParamValues values, Tier home) {
  const Layout& layout = core_.store.layout();
  const Placement place = layout.placement(param);
  const ArrayId compute_id{place.chunk, ArrayKind::kParam};
  PS_CHECK(core_.store.array(compute_id).holds == 0, StateError, core_.store.param_name(param),
           " cannot be written while a module that uses it runs; write it between steps");
  if (!layout.chunk(place.chunk).trainable) return write_frozen(param, values);
  const ArrayId id{place.chunk, kind};
  pager_.ensure_state(id, home);
  ArrayRecord& record = core_.store.array(id);
  const int64_t num_bytes = layout.param(param).numel * static_cast<int64_t>(sizeof(float));
  if (record.on_device) {
    core_.transfer.await_on_device(id);
    core_.backend.copy(Queue::kCompute, static_cast<float*>(record.slot.data) + place.offset, values.data, num_bytes);
    core_.backend.synchronize(core_.backend.record(Queue::kCompute));
    pager_.set_on_device(id);
  } else {
    pager_.bring_to_host(id);
    copy_to_host(static_cast<float*>(record.block.data) + place.offset, values, num_bytes);
    pager_.set_on_host(id);
  }
  if (kind == ArrayKind::kMaster) pager_.discard(compute_id);
}

void ChunkValues::copy_to_host(void* to, ParamValues values, int64_t num_bytes) {
  if (values.where == Tier::kDevice) {
    core_.backend.copy(Queue::kCompute, to, values.data, num_bytes);
    core_.backend.synchronize(core_.backend.record(Queue::kCompute));
    return;
  }
  core_.pool.parallel_for(num_bytes, kCopyGrain, [&](int64_t begin, int64_t end) {
    std::memcpy(static_cast<char*>(to) + begin, reinterpret_cast<const char*>(values.data) + begin,
                static_cast<size_t>(end - begin));
  });
}

void ChunkValues::write_frozen(ParamId param, ParamValues values) {
  const Layout& layout = core_.store.layout();
  const Placement place = layout.placement(param);
  const DType dtype = layout.chunk(place.chunk).dtype;
  const ArrayId id{place.chunk, ArrayKind::kParam};
  ArrayRecord& record = core_.store.array(id);
  if (record.exists()) {
    pager_.bring_to_host(id);
  } else {
    pager_.ensure_block(id);
  }
  void* data = static_cast<char*>(record.block.data) + place.offset * element_size(dtype);
  const int64_t numel = layout.param(param).numel;
  std::vector<float> staged;
  if (values.where == Tier::kDevice) {
    staged.resize(static_cast<size_t>(numel));
    copy_to_host(staged.data(), values, numel * static_cast<int64_t>(sizeof(float)));
    values.data = staged.data();
  }
  core_.host_compute.cast_from_float(values.data, data, dtype, numel);
  pager_.drop_slot(id);
  pager_.set_on_host(id);
}

void ChunkValues::read(ParamId param, ArrayKind kind, float* values) {
  const Layout& layout = core_.store.layout();
  const Placement place = layout.placement(param);
  if (!layout.chunk(place.chunk).trainable) {
    PS_CHECK(kind == ArrayKind::kMaster, ArgumentError, core_.store.param_name(param), " is frozen and has no ",
             array_kind_name(kind));
    return read_frozen(param, values);
  }
  const ArrayId id{place.chunk, kind};
  const ArrayRecord& record = core_.store.array(id);
  const int64_t num_bytes = layout.param(param).numel * static_cast<int64_t>(sizeof(float));
  if (!record.exists()) {  // a moment before the first step
    std::memset(values, 0, static_cast<size_t>(num_bytes));
  } else if (record.on_device) {
    core_.transfer.await_on_device(id);
    core_.backend.wait(Queue::kDownload, core_.backend.record(Queue::kCompute));
    core_.backend.copy(Queue::kDownload, values, static_cast<const float*>(record.slot.data) + place.offset, num_bytes);
    core_.backend.synchronize(core_.backend.record(Queue::kDownload));
  } else {
    pager_.bring_to_host(id);
    std::memcpy(values, static_cast<const float*>(record.block.data) + place.offset, static_cast<size_t>(num_bytes));
  }
}

void ChunkValues::read_frozen(ParamId param, float* values) {
  const Layout& layout = core_.store.layout();
  const Placement place = layout.placement(param);
  const DType dtype = layout.chunk(place.chunk).dtype;
  const ArrayId id{place.chunk, ArrayKind::kParam};
  pager_.bring_to_host(id);
  const auto* data = static_cast<const char*>(core_.store.array(id).block.data) + place.offset * element_size(dtype);
  core_.host_compute.cast_to_float(data, dtype, values, layout.param(param).numel);
}

}  // namespace patrickstar
