// Reduce-scatters of GradientFlow: the part of a gradient's way that ranks share (engine/gradient_flow.h).
#include <algorithm>
#include <optional>
#include <utility>

#include "common/check.h"
#include "engine/gradient_flow.h"

namespace patrickstar {

void GradientFlow::note_done(ChunkId chunk) {
  ChunkProgress& chunk_progress = progress(chunk);
  if (chunk_progress.accumulations == 0) return;
  chunk_progress.done_access = recorder_.position();
  chunk_progress.done_order = ++num_done_;
}

// At the end of a backward, each chunk's last gradient is known.
void GradientFlow::record_done() {
  std::vector<ChunkId> done;
  for (ChunkId chunk = 0; chunk < store_.num_chunks(); ++chunk) {
    if (progress(chunk).done_order > 0) done.push_back(chunk);
  }
  std::sort(done.begin(), done.end(),
            [this](ChunkId a, ChunkId b) { return progress(a).done_order < progress(b).done_order; });
  for (ChunkId chunk : done) {
    recorder_.add_at(progress(chunk).done_access, {{chunk, ArrayKind::kGrad}, ArrayUseMode::kFinalise});
  }
}

bool GradientFlow::is_complete_here(ChunkId chunk) const {
  return std::find(complete_here_.begin(), complete_here_.end(), chunk) != complete_here_.end();
}

void GradientFlow::scatter_planned() {
  PlanReplay& replay = pager_.replay();
  for (auto chunk = replay.due_scatter(); chunk && is_complete_here(*chunk); chunk = replay.due_scatter()) {
    replay.pop_scatter();
    forget_complete(*chunk);
    scatter(*chunk, Extent::kComplete);
  }
}

void GradientFlow::scatter_due() {
  scatter_planned();
  PlanReplay& replay = pager_.replay();
  for (auto chunk = replay.due_scatter(); chunk; chunk = replay.due_scatter()) {
    replay.pop_scatter();
    scatter(*chunk, Extent::kPartial);
    scatter_planned();
  }
}

void GradientFlow::forget_complete(ChunkId chunk) {
  complete_here_.erase(std::remove(complete_here_.begin(), complete_here_.end(), chunk), complete_here_.end());
}

// Reports the bytes that this reduce-scatter holds, for the error that names the least limit (engine/step_course.cpp).
// A planned step reduce-scatters slightly later, when activation memory may be lower.
void GradientFlow::note_needed_to_scatter(ChunkId chunk) {
  int64_t held_bytes = 0;
  for (int index = 0; index < store_.num_arrays(); ++index) {
    const ArrayId id = ArrayId::from_index(index);
    if (memory_.array(id).device_buffer && memory_.array(id).holds > 0) held_bytes += store_.num_bytes(id);
  }
  const int64_t grad_bytes = store_.num_bytes({chunk, ArrayKind::kGrad});
  memory_.backend().note_needed_chunk_buffers(held_bytes + 2 * grad_bytes +
                                              store_.num_bytes({chunk, ArrayKind::kGradShard}));
}

// Writes zeros for parameters without a gradient here; other ranks may have one.
void GradientFlow::fill_missing(ChunkId chunk) {
  const ChunkSpec& spec = store_.chunk(chunk);
  const ArrayId grad{chunk, ArrayKind::kGrad};
  const bool fresh = !memory_.array(grad).exists();
  void* data = pager_.open_for_write(grad);
  if (fresh) return memory_.backend().fill_zero(Queue::kCompute, data, spec.num_bytes(grad.kind));
  for (ParamId param : spec.params) {
    if (is_in_device_buffer(param)) continue;
    const int64_t begin = store_.layout().placement(param).offset * element_size(spec.dtype);
    memory_.backend().fill_zero(Queue::kCompute, static_cast<char*>(data) + begin,
                                store_.layout().param(param).numel * element_size(spec.dtype));
  }
}

void GradientFlow::scatter(ChunkId chunk, Extent extent) { carry_out(finalisation_of(chunk, extent)); }

void GradientFlow::scatter_mean(ChunkId chunk) {
  const ArrayId shard{chunk, ArrayKind::kGradShard};
  const bool again = std::exchange(progress(chunk).scattered, true);
  updates_.cancel(chunk);
  const ScopedHold grad_hold(memory_.array({chunk, ArrayKind::kGrad}));
  const ScopedHold shard_hold(memory_.array(shard));
  fill_missing(chunk);
  enqueue_mean(chunk, pager_.open_for_write(shard), again);
}

// Enqueues the reduce-scatter of the chunk's mean gradients and their statistics. `again`: adds this rank's shard to
// `sum`; otherwise writes it there.
void GradientFlow::enqueue_mean(ChunkId chunk, void* sum, bool again) {
  const ChunkSpec& spec = store_.chunk(chunk);
  const ArrayId grad{chunk, ArrayKind::kGrad};
  const ArrayId shard{chunk, ArrayKind::kGradShard};
  Backend& backend = memory_.backend();
  ArrayRecord& grad_record = memory_.array(grad);
  ArrayRecord& shard_record = memory_.array(shard);
  DeviceBuffer scratch =
      pager_.take_device_buffer(spec.num_bytes(grad.kind) + (again ? spec.num_bytes(shard.kind) : 0), grad);
  void* more = static_cast<char*>(scratch.data) + spec.num_bytes(grad.kind);
  statistics_.prepare_device();
  if (measures_parts()) parts_->prepare_device();
  collectives_.note_scatter(chunk);
  memory_.await_device_buffer(Queue::kScatter, scratch);
  memory_.await_device_buffer(Queue::kScatter, shard_record.device_buffer);
  backend.wait(Queue::kScatter, backend.record(Queue::kCompute));
  if (measures_parts()) {
    if (again) {
      parts_state_ = PartsState::kIncomplete;
    } else {
      parts_->enqueue_scattered(chunk, grad_record.device_buffer.data);
      note_part(spec.params);
    }
  }
  const int64_t others_bytes = spec.num_bytes(grad.kind) - spec.num_bytes(shard.kind);
  {
    const TraceScope span(memory_.tracer(), {Track::kScatter, StallCause::kNone, grad, others_bytes});
    backend.enqueue(Queue::kScatter,
                    [&group = collectives_.scatter_group(spec.sharding), whole = grad_record.device_buffer.data,
                     to = again ? more : sum, scratch = scratch.data, numel = spec.shard_numel,
                     dtype = spec.dtype] { group.reduce_scatter_mean(whole, to, scratch, numel, dtype); });
  }
  if (again) {
    backend.enqueue(Queue::kScatter, [&compute = memory_.device_compute(), sum, more, dtype = spec.dtype,
                                      numel = spec.shard_numel] { compute.add(sum, more, dtype, numel); });
  }
  if (!accumulates_) statistics_.enqueue_scattered(chunk, sum);
  memory_.counters().scattered_bytes += others_bytes;
  last_scatter_ = backend.record(Queue::kScatter);
  shard_record.device_ready = last_scatter_;
  shard_record.device_buffer.busy = {last_scatter_, nullptr};
  grad_record.device_buffer.busy.copied = last_scatter_;
  scratch.busy = {last_scatter_, nullptr};
}

bool GradientFlow::scatter_rest(BackwardEnd mine) {
  const int num_params = store_.layout().num_params();
  const auto is_shared = [this](ChunkId chunk) { return store_.chunk(chunk).is_sharded(); };
  // per parameter and chunk that ranks share; the last one: any other parameter has a gradient
  std::vector<uint8_t> flags;
  bool any_own = false;
  for (ParamId param = 0; param < num_params; ++param) {
    const bool shared = is_shared(store_.layout().placement(param).chunk);
    flags.push_back(shared && gradients_.in_grad(param));
    any_own = any_own || (!shared && gradients_.in_grad(param));
  }
  for (ChunkId chunk = 0; chunk < store_.num_chunks(); ++chunk) {
    flags.push_back(is_shared(chunk) && memory_.array({chunk, ArrayKind::kGrad}).exists());
  }
  flags.push_back(any_own);
  if (!collectives_.any_over_ranks(flags, mine)) return false;
  any_rank_has_own_ = flags.back() != 0;
  complete_here_.clear();
  for (ParamId param = 0; param < num_params; ++param) {
    const ChunkId chunk = store_.layout().placement(param).chunk;
    if (!is_shared(chunk) || gradients_.in_grad(param) == (flags[static_cast<size_t>(param)] != 0)) continue;
    updates_.cancel(chunk);  // a speculative update without this gradient is wrong
    gradients_.set_in_grad(param, true);
  }
  for (ChunkId chunk = 0; chunk < store_.num_chunks(); ++chunk) {
    if (flags[static_cast<size_t>(num_params + chunk)] != 0) scatter(chunk);
  }
  return true;
}

}  // namespace patrickstar
