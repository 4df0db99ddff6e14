// Copies of arrays as stored, between devices (engine/value_ranges.h).
#include <algorithm>
#include <vector>

#include "common/check.h"
#include "engine/value_ranges.h"

namespace patrickstar {

std::vector<ArrayId> ValueRanges::stored_arrays(ParamId param) const {
  const Layout& layout = memory_.layout();
  const ChunkId chunk = layout.placement(param).chunk;
  const ChunkSpec& spec = layout.chunk(chunk);
  if (!spec.trainable || spec.puts_values_in_place()) return {};
  std::vector<ArrayId> arrays;
  if (spec.rows.param().source == Source::kNone) arrays.push_back(layout.param_resting_tier(chunk));
  for (ArrayKind kind : spec.state_kinds()) {
    if (is_8_bit(spec.states.of(kind))) return {};
    arrays.push_back({chunk, kind});
  }
  return arrays;
}

std::vector<int64_t> ValueRanges::stored_bytes(ParamId param) const {
  std::vector<int64_t> result;
  for (ArrayId id : stored_arrays(param)) {
    const ChunkSpec& spec = memory_.layout().chunk(id.chunk);
    const bool is_value = id.kind == spec.param_resting_tier();
    result.push_back(is_value ? element_size(spec.dtype) : state_offset(spec.states.of(id.kind), 1));
  }
  return result;
}

bool ValueRanges::is_stored_on_device(ParamId param) const {
  const std::vector<ArrayId> arrays = stored_arrays(param);
  const auto is_there = [&](ArrayId id) { return memory_.array(id).on_device; };
  return !arrays.empty() && std::all_of(arrays.begin(), arrays.end(), is_there);
}

std::vector<const void*> ValueRanges::stored_on_device(ParamId param) {
  PS_CHECK(is_stored_on_device(param), StateError, memory_.store().param_name(param),
           " is not on the device; read its values into memory or a file");
  const ParamShard shard = memory_.layout().shard_of(param);
  const std::vector<int64_t> bytes = stored_bytes(param);
  std::vector<const void*> result;
  for (ArrayId id : stored_arrays(param)) {
    memory_.await_on_device(id);
    const auto* const data = static_cast<const char*>(memory_.array(id).device_buffer.data);
    result.push_back(data + shard.offset * bytes[result.size()]);
  }
  return result;
}

void ValueRanges::write_stored(ParamId param, const std::vector<StoredRange>& ranges) {
  const std::vector<ArrayId> arrays = stored_arrays(param);
  const std::vector<int64_t> bytes = stored_bytes(param);
  const ParamShard shard = memory_.layout().shard_of(param);
  std::vector<int64_t> given(arrays.size(), 0);
  for (const StoredRange& range : ranges) {
    PS_CHECK(0 <= range.array && range.array < static_cast<int>(arrays.size()), ArgumentError, "array ", range.array,
             " of ", memory_.store().param_name(param), ", which has ", arrays.size());
    given[static_cast<size_t>(range.array)] += range.end - range.begin;
  }
  for (int64_t numel : given) {
    PS_CHECK(numel == shard.numel, ArgumentError, memory_.store().param_name(param), ": ", numel,
             " elements are given of a part of ", shard.numel);
  }
  const ChunkId chunk = memory_.layout().placement(param).chunk;
  const Tier resting_tier = memory_.store().resting_tier(chunk);
  for (const ArrayId id : arrays) values_.make_stored(id, resting_tier);
  for (const StoredRange& range : ranges) {
    const int64_t size = bytes[static_cast<size_t>(range.array)];
    values_.write_stored(arrays[static_cast<size_t>(range.array)], (shard.offset + range.begin - shard.begin) * size,
                         {range.from, range.where}, (range.end - range.begin) * size);
  }
}

}  // namespace patrickstar
