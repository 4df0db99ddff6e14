#include "engine/matrix_updates.h"

#include <algorithm>
#include <utility>

#include "common/check.h"

namespace patrickstar {

MatrixUpdates::MatrixUpdates(ChunkMemory& memory, std::shared_ptr<const optim::MatrixRule> rule,
                             const std::vector<std::vector<int64_t>>& shapes, Tier lowest)
    : memory_(memory), rule_(std::move(rule)), shapes_(shapes) {
  const Layout& layout = memory.layout();
  PS_CHECK(rule_ == nullptr || static_cast<int>(shapes.size()) == layout.num_params(), ArgumentError,
           "a rule of whole matrices was given with ", shapes.size(), " shapes for ", layout.num_params(),
           " parameters; give one for each");
  for (ParamId param = 0; param < layout.num_params(); ++param) {
    if (!has(param) || !layout.chunk(layout.placement(param).chunk).trainable) continue;
    check(param);
    largest_numel_ = std::max(largest_numel_, layout.param(param).numel);
  }
  if (is_empty()) return;
  const size_t num_queues = lowest == Tier::kDisk ? 2 : 1;
  scratch_ = memory.arena().reserve(std::vector<int64_t>(num_queues, largest_numel_ * 4));
}

// Checks the layout alone, so that all ranks refuse alike.
void MatrixUpdates::check(ParamId param) const {
  const Layout& layout = memory_.layout();
  const Placement& placement = layout.placement(param);
  const ChunkSpec& spec = layout.chunk(placement.chunk);
  const std::string& name = memory_.store().param_name(param);
  const int64_t numel = layout.param(param).numel;
  const int64_t first = placement.offset / spec.shard_numel;
  const int64_t last = (placement.offset + numel - 1) / spec.shard_numel;
  PS_CHECK(first == last, ArgumentError, name, " is updated as a whole matrix, but its ", numel, " elements lie on ",
           last - first + 1, " ranks, which share chunks in shards of ", spec.shard_numel,
           " elements; train with one rank, or with an optimizer that updates element by element");
  PS_CHECK(spec.states.master == StateType::kFloat32 && spec.states.momentum == StateType::kFloat32, ArgumentError,
           name, " is updated as a whole matrix, which needs a float32 master and momentum, but its chunk has others; ",
           "leave optimizer.master and optimizer.states as they are by default, and set optimizer.speculation to ",
           "\"never\"");
}

bool MatrixUpdates::has_any(ChunkId chunk) const {
  if (is_empty()) return false;
  const std::vector<ParamId>& params = memory_.layout().chunk(chunk).params;
  return std::any_of(params.begin(), params.end(), [this](ParamId param) { return has(param); });
}

void* MatrixUpdates::host_scratch(Tier states) {
  if (is_empty()) return nullptr;
  HostBuffer& block = states == Tier::kDisk ? scratch_.back() : scratch_.front();
  memory_.arena().prepare(block);
  return block.data;
}

optim::MatrixScalars MatrixUpdates::scalars(ParamId param, const GroupOptions& options, float grad_scale,
                                            void* scratch) const {
  const std::vector<int64_t>& shape = shapes_[static_cast<size_t>(param)];
  const MatrixStep step = matrix_step_of(options);
  return {rule_.get(), shape[0], shape[1], grad_scale, step.decay, step.step_size, static_cast<float*>(scratch)};
}

}  // namespace patrickstar
