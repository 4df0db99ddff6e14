#include "engine/unfreezing.h"

#include <algorithm>
#include <utility>

#include "common/check.h"
#include "common/sizes.h"
#include "plan/chunk_bytes.h"
#include "plan/placement.h"

namespace patrickstar {

Unfreezing::Unfreezing(Pager& pager, ChunkValues& values, Residency& residency, const MatrixUpdates& matrices,
                       GradientFlow& gradients, Updates& updates, StepPlanner& planner,
                       std::vector<std::vector<ParamId>> module_params)
    : pager_(pager),
      memory_(pager.memory()),
      values_(values),
      residency_(residency),
      matrices_(matrices),
      gradients_(gradients),
      updates_(updates),
      planner_(planner),
      module_params_(std::move(module_params)) {}

void Unfreezing::make_states(const std::vector<ChunkId>& chunks) {
  for (ChunkId chunk : chunks) {
    PS_CHECK(chunk >= 0 && chunk < layout().num_chunks() && !layout().chunk(chunk).trainable, ArgumentError, "chunk ",
             chunk, " is not a frozen one");
    const ChunkSpec& spec = layout().chunk(chunk);
    PS_CHECK(!spec.is_quantized(), ArgumentError, memory_.store().param_name(spec.params.front()), " is quantised (",
             quant_type_name(spec.quantization),
             ") and cannot be trained; leave it out of quantisation from the start ",
             "(skip_modules), or train adapters beside it");
    PS_CHECK(!memory_.has_format() && std::none_of(spec.params.begin(), spec.params.end(),
                                                   [this](ParamId param) { return matrices_.has(param); }),
             ArgumentError, memory_.store().param_name(spec.params.front()),
             " is frozen and cannot be trained from now on, since the engine has a compute format or a rule of whole "
             "matrices; train it from the start");
  }
  Layout then = layout();
  for (ChunkId chunk : chunks) then.train(chunk);
  check_device(then);
  check_host(then, chunks);
  try {
    for (ChunkId chunk : chunks) make_states_of(chunk);
  } catch (...) {
    discard_states(chunks);
    throw;
  }
}

void Unfreezing::discard_states(const std::vector<ChunkId>& chunks) {
  for (ChunkId chunk : chunks) {
    for (ArrayKind kind : layout().chunk(chunk).state_kinds()) memory_.discard({chunk, kind});
  }
  memory_.arena().trim();
}

void Unfreezing::train(const std::vector<ParamId>& params) {
  for (ParamId param : params) {
    const ChunkId chunk = layout().placement(param).chunk;
    if (layout().chunk(chunk).trainable) {
      updates_.cancel(chunk);
      values_.round_master(param);
    }
  }
  for (ParamId param : params) {
    const ChunkId chunk = layout().placement(param).chunk;
    if (!layout().chunk(chunk).trainable)
      memory_.store().set_resting_tier(chunk, residency_.resting_tier_of_new_states(chunk));
    memory_.store().train(chunk);
  }
  gradients_.cover_trainable();
  planner_.forget_step();
  updates_.forget_choice();
}

void Unfreezing::check_device(const Layout& then) const {
  const int64_t working_set = working_set_bytes(then, module_params_);
  const int64_t limit = memory_.device().options().device_limit_bytes;
  PS_CHECK(working_set <= limit, MemoryBudgetError, "device_memory is ", show_exactly(limit),
           ", but with the parameters that are unfrozen the largest module's chunks and their gradients alone take ",
           show_exactly(working_set), "; raise device_memory to at least ", show_enough(working_set),
           " (activations come on top), or lower default_chunk_size (", then.chunk_numel(), " elements)");
}

int64_t Unfreezing::free_host_bytes() const {
  return memory_.arena().free_bytes() - pager_.reserved_host_bytes() - spare_bytes(layout());
}

void Unfreezing::check_host(const Layout& then, const std::vector<ChunkId>& chunks) {
  int64_t needed = 0;
  for (ChunkId chunk : chunks) {
    if (residency_.resting_tier_of_new_states(chunk) != Tier::kHost) continue;
    needed += resting_tier_bytes(then.chunk(chunk)) - then.chunk(chunk).num_bytes(ArrayKind::kParamShard);
    const ArrayId param = layout().param_resting_tier(chunk);
    if (!memory_.array(param).block && !pager_.keeps_place(chunk)) needed += layout().num_bytes(param);
  }
  if (needed > free_host_bytes()) updates_.release_host_memory();
  const int64_t free = free_host_bytes();
  const int64_t limit = memory_.arena().limit_bytes();
  PS_CHECK(needed <= free, MemoryBudgetError, "the parameters that are unfrozen need ", show_exactly(needed),
           " of host memory for optimizer states and values, but of host_memory, ", show_exactly(limit), ", ",
           show_exactly(std::max<int64_t>(free, 0)), " are free; raise host_memory to at least ",
           show_enough(limit + needed - free), ", or freeze them again with requires_grad_(False)");
}

void Unfreezing::make_states_of(ChunkId chunk) {
  const ChunkSpec& spec = layout().chunk(chunk);
  const ArrayId param = layout().param_resting_tier(chunk);
  const ArrayId master{chunk, ArrayKind::kMaster};
  const Tier resting_tier = residency_.resting_tier_of_new_states(chunk);
  if (!spec.keeps_param()) {
    pager_.bring_to_host(param);
    pager_.ensure_state(master, Tier::kHost);
    memory_.host_compute().cast_to_float(memory_.array(param).block.data, spec.dtype,
                                         static_cast<float*>(memory_.array(master).block.data), spec.shard_numel);
  }
  for (ArrayKind kind : spec.state_kinds()) pager_.ensure_state({chunk, kind}, resting_tier);
  if (resting_tier == Tier::kDevice) residency_.move_states_to_device(chunk);
}

}  // namespace patrickstar
