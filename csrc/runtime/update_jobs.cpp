#include "runtime/update_jobs.h"

#include <cmath>
#include <utility>

namespace patrickstar {

namespace {

char* at(void* data, int64_t offset, DType dtype) { return static_cast<char*>(data) + offset * element_size(dtype); }
const char* at(const void* data, int64_t offset, DType dtype) {
  return static_cast<const char*>(data) + offset * element_size(dtype);
}

// The float32 constants of one step, from the options in binary64 (kernels.h).
optim::AdamScalars make_scalars(const GroupOptions& options, int64_t step_count, float grad_scale) {
  const auto step = static_cast<double>(step_count);
  const bool corrects = options.bias_correction == BiasCorrection::kApplied;
  const double bias_correction1 = corrects ? 1 - std::pow(options.beta1, step) : 1;
  const double bias_correction2 = corrects ? 1 - std::pow(options.beta2, step) : 1;
  const bool l2 = options.mode == WeightDecay::kL2;
  optim::AdamScalars scalars{};
  scalars.grad_scale = grad_scale;
  scalars.weight_decay = l2 ? static_cast<float>(options.weight_decay) : 0.0f;
  scalars.decay = l2 ? 1.0f : static_cast<float>(1 - options.lr * options.weight_decay);
  scalars.beta2 = static_cast<float>(options.beta2);
  scalars.one_minus_beta1 = static_cast<float>(1 - options.beta1);
  scalars.one_minus_beta2 = static_cast<float>(1 - options.beta2);
  scalars.inv_sqrt_bias_correction2 = static_cast<float>(1 / std::sqrt(bias_correction2));
  scalars.eps = static_cast<float>(options.eps);
  scalars.step_size = static_cast<float>(options.lr / bias_correction1);
  return scalars;
}

}  // namespace

UpdateJobs::UpdateJobs(Core core, const GradientFlow& gradients)
    : core_(core),
      gradients_(gradients),
      group_of_(static_cast<size_t>(core.store.layout().num_params()), 0),
      step_counts_(group_of_.size(), 0) {}

void UpdateJobs::count_step(ChunkId chunk) {
  for (ParamId param : core_.store.layout().chunk(chunk).params) {
    if (gradients_.has_gradient(param)) ++step_counts_[static_cast<size_t>(param)];
  }
}

std::vector<Restore> UpdateJobs::restores(ChunkId chunk, const UpdateTarget& target) const {
  const Layout& layout = core_.store.layout();
  const DType dtype = layout.chunk(chunk).dtype;
  const ArrayRecord& master = core_.store.array({chunk, ArrayKind::kMaster});
  const auto* from = static_cast<const float*>(target.on_device ? master.slot.data : master.block.data);
  std::vector<Restore> result;
  for (ParamId param : layout.chunk(chunk).params) {
    const ParamShard shard = layout.shard_of(param);
    if (gradients_.has_gradient(param) || shard.numel == 0) continue;
    result.push_back({from + shard.offset, at(target.param, shard.offset, dtype), dtype, shard.numel});
  }
  return result;
}

std::vector<Carry> UpdateJobs::carries(ChunkId chunk, const NewStates& states) const {
  const Layout& layout = core_.store.layout();
  const OptimizerArrays kinds = optimizer_arrays();
  std::vector<Carry> result;
  for (ParamId param : layout.chunk(chunk).params) {
    const ParamShard shard = layout.shard_of(param);
    if (gradients_.has_gradient(param) || shard.numel == 0) continue;
    const int64_t offset = shard.offset;
    const int64_t num_bytes = shard.numel * static_cast<int64_t>(sizeof(float));
    for (size_t i = 0; i < states.states.size(); ++i) {
      const auto* from = static_cast<const float*>(core_.store.array({chunk, kinds.kinds[i]}).block.data);
      result.push_back({from + offset, static_cast<float*>(states.states[i].data) + offset, num_bytes});
    }
  }
  return result;
}

void UpdateJobs::add(ChunkId chunk, const UpdateTarget& target, const std::vector<GroupOptions>& groups,
                     float grad_scale, std::vector<optim::AdamJob>& jobs) const {
  const Layout& layout = core_.store.layout();
  const ChunkSpec& spec = layout.chunk(chunk);
  const auto array = [&](ArrayKind kind) {
    const ArrayRecord& record = core_.store.array({chunk, kind});
    return static_cast<float*>(target.on_device ? record.slot.data : record.block.data);
  };
  const auto new_state = [&](size_t index, int64_t offset) {
    return target.apart == nullptr ? nullptr : static_cast<float*>(target.apart->states[index].data) + offset;
  };
  // Neighbours of one group and step count are updated as one range.
  int64_t end = -1;
  std::pair<int, int64_t> last_key{-1, -1};
  for (ParamId param : spec.params) {
    const ParamShard shard = layout.shard_of(param);
    if (!gradients_.has_gradient(param) || shard.numel == 0) continue;
    const int64_t offset = shard.offset;
    const int64_t numel = shard.numel;
    const int group = group_of_[static_cast<size_t>(param)];
    const std::pair<int, int64_t> key{group, step_counts_[static_cast<size_t>(param)] + 1};
    if (offset == end && key == last_key) {
      jobs.back().range.numel += numel;
    } else {
      jobs.push_back({{array(ArrayKind::kMaster) + offset, array(ArrayKind::kMomentum) + offset,
                       array(ArrayKind::kVariance) + offset, at(target.grad, offset, target.grad_dtype),
                       at(target.param, offset, spec.dtype), target.grad_dtype, spec.dtype, numel, new_state(0, offset),
                       new_state(1, offset), new_state(2, offset)},
                      make_scalars(groups[static_cast<size_t>(group)], key.second, grad_scale)});
    }
    end = offset + numel;
    last_key = key;
  }
}

}  // namespace patrickstar
