#include "engine/quantized_values.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "common/check.h"

namespace patrickstar {

void QuantizedValues::write(ParamId param, const float* values) {
  const ArrayId id = layout().value_resting_tier(layout().placement(param).chunk);
  if (is_written_[static_cast<size_t>(param)] != 0 && has(param, values)) return;
  ArrayRecord& record = memory_.array(id);
  if (!record.block) is_best_effort_[static_cast<size_t>(id.chunk)] = 1;
  if (record.exists()) {
    pager_.bring_to_host(id);
  } else {
    pager_.ensure_state(id, Tier::kHost);
  }
  try {
    memory_.host_quantizer().quantize(values, layout().param(param).numel,
                                      layout().quantized_part(param, record.block.data));
  } catch (const ArgumentError& error) {
    throw ArgumentError(memory_.store().param_name(param) + ": " + error.what());
  }
  is_written_[static_cast<size_t>(param)] = 1;
  memory_.leave_device(id);
  record.set_on_host();
  memory_.discard({id.chunk, ArrayKind::kParam});
  settle(id);
}

void QuantizedValues::settle(ArrayId id) {
  const std::vector<ParamId>& params = memory_.store().chunk(id.chunk).params;
  const bool is_complete = std::all_of(params.begin(), params.end(),
                                       [this](ParamId param) { return is_written_[static_cast<size_t>(param)] != 0; });
  if (memory_.store().resting_tier(id.chunk) == Tier::kHost || !is_complete) return;
  pager_.bring(id);
  if (std::exchange(is_best_effort_[static_cast<size_t>(id.chunk)], 0) != 0) memory_.drop_host_buffer(id);
}

bool QuantizedValues::has(ParamId param, const float* values) {
  const DType dtype = layout().param(param).dtype;
  const ParamShard shard = layout().shard_of(param);
  const auto numel = static_cast<size_t>(shard.numel);
  std::vector<float> own(numel);
  std::vector<float> given(numel);
  std::vector<char> rounded(numel * static_cast<size_t>(element_size(dtype)));
  read(param, own.data());
  memory_.host_compute().cast_from_float(values + shard.begin, rounded.data(), dtype, shard.numel);
  memory_.host_compute().cast_to_float(rounded.data(), dtype, given.data(), shard.numel);
  return std::memcmp(own.data(), given.data(), numel * sizeof(float)) == 0;
}

void QuantizedValues::read(ParamId param, float* values) {
  const ArrayId id = layout().value_resting_tier(layout().placement(param).chunk);
  const DType dtype = layout().param(param).dtype;
  const ArrayRecord& record = memory_.array(id);
  PS_CHECK(record.exists(), StateError, memory_.store().describe(id), " has no value");
  std::vector<char> copy;
  void* quantized = record.block.data;
  if (record.on_host) {
    memory_.await_on_host(id);
  } else {
    copy.resize(static_cast<size_t>(layout().num_bytes(id)));
    quantized = copy.data();
    memory_.await_on_device(id);
    memory_.backend().wait(Queue::kDownload, memory_.backend().record(Queue::kCompute));
    memory_.backend().copy(Queue::kDownload, quantized, record.device_buffer.data, layout().num_bytes(id));
    memory_.backend().synchronize(memory_.backend().record(Queue::kDownload));
  }
  const QuantizedPart part = layout().quantized_part(param, quantized);
  std::vector<char> rounded(static_cast<size_t>(part.numel * element_size(dtype)));
  memory_.host_quantizer().dequantize({{part, rounded.data(), dtype}});
  memory_.host_compute().cast_to_float(rounded.data(), dtype, values, part.numel);
}

}  // namespace patrickstar
