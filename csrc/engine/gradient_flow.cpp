#include "engine/gradient_flow.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <utility>

#include "common/check.h"

namespace patrickstar {

GradientFlow::GradientFlow(Pager& pager, Gradients& gradients, Updates& updates, Recorder& recorder,
                           Collectives& collectives, const Step& step)
    : pager_(pager),
      memory_(pager.memory()),
      store_(pager.store()),
      gradients_(gradients),
      updates_(updates),
      recorder_(recorder),
      collectives_(collectives),
      step_(step),
      statistics_(pager, collectives, GradientStatistics::Extent::kShard),
      in_device_buffer_(static_cast<size_t>(store_.layout().num_params()), 0),
      progress_(static_cast<size_t>(store_.num_chunks())) {
  for (ChunkId chunk = 0; chunk < store_.num_chunks(); ++chunk) {
    progress(chunk).expected_accumulations = static_cast<int>(store_.chunk(chunk).params.size());
  }
}

void GradientFlow::begin_backward() {
  if (num_backwards_ > 0) {
    accumulates_ = true;
    add_to_sums();
  }
  if (++num_backwards_ == 1) forget_parts();
  any_rank_has_own_ = false;
  for (ChunkProgress& chunk : progress_) {
    chunk.accumulations = 0;
    chunk.complete = false;
    chunk.scattered = false;
    chunk.done_order = 0;
  }
  num_done_ = 0;
}

void GradientFlow::accumulate(ParamId param, const void* data) {
  const Placement place = store_.layout().placement(param);
  const ChunkSpec& chunk = store_.chunk(place.chunk);
  const ArrayId grad{place.chunk, ArrayKind::kGrad};
  PS_CHECK(step_.is(StepState::kBackward), StateError, store_.param_name(param),
           " gets a gradient outside of its engine's ",
           "backward: loss.backward() was called; call model.backward(loss) instead (accelerator.backward(loss) under ",
           "Accelerate and in a Trainer), so that gradients are scaled and gathered. A loss that comes of several ",
           "engines is made, and its backward called, on one thread");
  PS_CHECK(chunk.trainable, StateError, store_.param_name(param),
           " gets a gradient, but its chunk has no optimizer states yet; set requires_grad before the forward begins");
  ArrayRecord& record = memory_.array(grad);
  if (!record.on_device) updates_.cancel(place.chunk);
  if (!accumulates_)
    pager_.put_into_activation_memory(grad);  // with several micro-batches it stays for another forward
  ScopedHold hold(record);
  void* target = element_at(pager_.open_for_write(grad), place.offset, chunk.dtype);
  hold.release();
  recorder_.add({grad, ArrayUseMode::kWrite});
  const int64_t numel = store_.layout().param(param).numel;
  if (is_in_device_buffer(param)) {
    memory_.device_compute().add(target, data, chunk.dtype, numel);
  } else {
    memory_.backend().copy(Queue::kCompute, target, data, numel * element_size(chunk.dtype));
  }
  in_device_buffer_[static_cast<size_t>(param)] = 1;
  gradients_.set_in_grad(param, true);
  statistics_.forget(place.chunk);
  if (store_.uses(param) == 0) store_.move_param(param, State::kHoldAfterBwd);
  ChunkProgress& chunk_progress = progress(place.chunk);
  chunk_progress.complete = ++chunk_progress.accumulations == chunk_progress.expected_accumulations;
  finalise_if_complete(place.chunk);
}

void GradientFlow::finalise_if_complete(ChunkId chunk) {
  if (!store_.is_dead(chunk)) return;
  if (store_.chunk(chunk).is_sharded()) note_done(chunk);
  if (progress(chunk).complete) finalise(chunk);
}

void GradientFlow::finalise(ChunkId chunk) {
  progress(chunk).complete = false;  // finalised once
  if (!memory_.array({chunk, ArrayKind::kGrad}).exists()) return;
  if (store_.chunk(chunk).is_sharded()) {
    complete_here_.push_back(chunk);
    pager_.replays() ? scatter_planned() : note_needed_to_scatter(chunk);
    return;
  }
  if (!statistics_.has(chunk) && !accumulates_) {
    statistics_.compute({chunk, gradients_.source(chunk)}, gradients_.in_chunk(chunk));
  }
  carry_out(finalisation_of(chunk, Extent::kComplete));
}

// The value is dead unless another micro-batch or a later use is expected.
Finalisation GradientFlow::finalisation_of(ChunkId chunk, Extent extent) {
  const ArrayId param{chunk, ArrayKind::kParam};
  Finalisation finalised;
  finalised.chunk = chunk;
  finalised.sharing = store_.chunk(chunk).is_sharded() ? Sharing::kShared : Sharing::kOwn;
  finalised.is_last = !accumulates_ && extent == Extent::kComplete;
  finalised.update = updates_.early_recipe(chunk);
  finalised.value_is_dead = !accumulates_ && store_.is_dead(chunk) && memory_.array(param).holds == 0 &&
                            pager_.next_use(param) == NextUse::kNever;
  finalised.value_is_taken = finalised.sharing == Sharing::kOwn && !memory_.is_derivable(param);
  finalised.leaves = !store_.has_states_on_device(chunk);
  return finalised;
}

void GradientFlow::carry_out(const Finalisation& finalised) {
  const ChunkId chunk = finalised.chunk;
  for (const Instruction& instruction : finalisation(finalised)) {
    switch (instruction.op) {
      case Op::kFree:
        ArrayId::from_index(instruction.operand).kind == ArrayKind::kParam ? free_value(chunk) : free_whole(chunk);
        break;
      case Op::kScatter:
        scatter_mean(chunk);
        break;
      case Op::kToHost:
        if (!pager_.push_out(resting_tier_of(chunk)))
          return;  // no room on the host: updated on the device after the norm
        break;
      case Op::kAwaitRoom:  // part of pager_.push_out()
        break;
      default:
        updates_.start_early(instruction.op, chunk);
    }
  }
  if (finalised.sharing == Sharing::kShared) return;
  // With optimizer-in-backward on the device, the new parameter may not take the gradient's memory.
  const bool has_ended =
      !memory_.is_derivable({chunk, ArrayKind::kParam}) && !memory_.array(resting_tier_of(chunk)).exists();
  if (finalised.leaves || (finalised.is_last && has_ended))
    recorder_.add({{chunk, ArrayKind::kGrad}, ArrayUseMode::kFinalise});
}

// Frees the value for the gradient to take its memory; if the value is part of a master, on the device alone.
void GradientFlow::free_value(ChunkId chunk) {
  const ArrayId param = store_.layout().param_resting_tier(chunk);
  if (store_.chunk(chunk).is_sharded()) memory_.discard({chunk, ArrayKind::kParam});
  if (memory_.is_derivable(param)) return memory_.discard(param);
  if (memory_.array(param).on_host) memory_.leave_device(param);
}

// The gradient's shard has its own memory.
void GradientFlow::free_whole(ChunkId chunk) {
  if (!store_.chunk(chunk).is_sharded()) return;
  memory_.discard({chunk, ArrayKind::kGrad});
  for (ParamId id : store_.chunk(chunk).params) in_device_buffer_[static_cast<size_t>(id)] = 0;
}

void GradientFlow::complete_backward() {
  for (ChunkId chunk = 0; chunk < store_.num_chunks(); ++chunk) {
    const ArrayRecord& grad = memory_.array({chunk, ArrayKind::kGrad});
    if (!store_.chunk(chunk).trainable || !grad.exists()) continue;
    for (ParamId param : store_.chunk(chunk).params) {
      if (store_.param_state(param) != State::kFree) store_.move_param(param, State::kHoldAfterBwd);
    }
    ChunkProgress& chunk_progress = progress(chunk);
    if (chunk_progress.accumulations == 0) continue;
    chunk_progress.expected_accumulations = chunk_progress.accumulations;
    // it had more gradients in the backward before
    if (!store_.chunk(chunk).is_sharded() && !grad.on_host) finalise(chunk);
  }
  if (store_.layout().has_other_ranks()) {
    record_done();
  } else if (measures_parts() && accumulates_) {
    measure_own_parts();
  }
}

void GradientFlow::measure_parts() {
  if (!parts_) parts_.emplace(pager_, collectives_, GradientStatistics::Extent::kWhole);
}

void GradientFlow::forget_parts() {
  parts_state_ = PartsState::kNone;
  part_params_.clear();
}

void GradientFlow::note_part(const std::vector<ParamId>& params) {
  if (parts_state_ == PartsState::kNone) parts_state_ = PartsState::kMeasured;
  part_params_.insert(part_params_.end(), params.begin(), params.end());
}

void GradientFlow::measure_own_parts() {
  for (ChunkId chunk = 0; chunk < store_.num_chunks(); ++chunk) {
    const std::vector<ParamId> here = gradients_.in_chunk(chunk);
    if (here.empty()) continue;
    parts_->compute({chunk, gradients_.source(chunk)}, here);
    note_part(here);
  }
}

double GradientFlow::squares_of_parts(const std::vector<ParamId>& left_out) {
  constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();
  if (!parts_) return kUnknown;
  std::vector<ParamId> params;
  for (ParamId param : part_params_) {
    if (!std::binary_search(left_out.begin(), left_out.end(), param)) params.push_back(param);
  }
  std::sort(params.begin(), params.end());
  return parts_->sum(params, parts_state_ == PartsState::kMeasured ? 0.0 : kUnknown);
}

bool GradientFlow::keep_backward() {
  const std::vector<uint8_t>& flags = gradients_.flags();
  const bool any = any_rank_has_own_ || std::any_of(flags.begin(), flags.end(), [](uint8_t has) { return has != 0; });
  if (!any) --num_backwards_;
  return any;
}

void GradientFlow::abort_backward() {
  for (ChunkId chunk = 0; chunk < store_.num_chunks(); ++chunk) {
    updates_.cancel(chunk);
    discard_gradients(chunk);
    for (ParamId param : store_.chunk(chunk).params) gradients_.set_in_grad(param, false);
    statistics_.forget(chunk);
  }
  num_backwards_ = gradients_.any_in_sum() ? std::max(num_backwards_ - 1, 1) : 0;
}

void GradientFlow::clear() {
  if (num_backwards_ > 0) accumulates_ = num_backwards_ > 1;
  for (ChunkId chunk = 0; chunk < store_.num_chunks(); ++chunk) forget(chunk);
  num_backwards_ = 0;
}

void GradientFlow::clear_param(ParamId param) {
  const ChunkId chunk = store_.layout().placement(param).chunk;
  note_rewritten(chunk);
  gradients_.set_in_grad(param, false);
  gradients_.set_in_sum(param, false);
}

void GradientFlow::note_rewritten(ChunkId chunk) {
  updates_.cancel(chunk);
  statistics_.forget(chunk);
}

void GradientFlow::forget(ChunkId chunk) {
  note_rewritten(chunk);
  discard_gradients(chunk);
  memory_.discard({chunk, ArrayKind::kGradSum});
  for (ParamId param : store_.chunk(chunk).params) {
    gradients_.set_in_grad(param, false);
    gradients_.set_in_sum(param, false);
  }
}

void GradientFlow::discard_gradients(ChunkId chunk) {
  const ArrayId whole{chunk, ArrayKind::kGrad};
  const ArrayId resting_tier = resting_tier_of(chunk);
  // Reserved memory of the gradient stays, since an update may still read it.
  const ArrayRecord& record = memory_.array(resting_tier);
  const bool has_place = store_.layout().row(resting_tier).on_host == ArrayMemory::kOwn;
  const bool is_idle = has_place && record.block && !record.on_host && !record.device_buffer;
  if (whole != resting_tier || !is_idle) memory_.discard(whole);
  if (!is_idle) memory_.discard(resting_tier);
  for (ParamId param : store_.chunk(chunk).params) in_device_buffer_[static_cast<size_t>(param)] = 0;
}

void GradientFlow::add_to_sums() {
  for (ChunkId chunk = 0; chunk < store_.num_chunks(); ++chunk) {
    if (memory_.array(resting_tier_of(chunk)).exists()) add_to_sum(chunk);
  }
}

void GradientFlow::add_to_sum(ChunkId chunk) {
  updates_.cancel(chunk);
  const ArrayId grad = resting_tier_of(chunk);
  const ArrayId sum{chunk, ArrayKind::kGradSum};
  ArrayRecord& grad_record = memory_.array(grad);
  ArrayRecord& sum_record = memory_.array(sum);
  const ChunkSpec& spec = store_.chunk(chunk);
  const bool on_device = sum_record.exists() ? sum_record.on_device : store_.has_states_on_device(chunk);
  ScopedHold grad_hold(grad_record);
  ScopedHold sum_hold(sum_record);
  if (on_device) {
    pager_.bring(grad);
    pager_.open_for_write(sum);
  } else {
    pager_.bring_to_host(grad);
    pager_.ensure_host_buffer(sum);
    memory_.await_on_host(sum);
  }
  std::optional<TraceScope> stall;
  if (!on_device) stall.emplace(memory_.tracer(), SpanLabel{Track::kStall, StallCause::kHostWork, sum});
  optim::Compute& compute = on_device ? memory_.device_compute() : memory_.host_compute();
  const void* from = on_device ? grad_record.device_buffer.data : grad_record.block.data;
  auto* to = static_cast<float*>(on_device ? sum_record.device_buffer.data : sum_record.block.data);
  for (ParamId param : spec.params) {
    if (!gradients_.in_grad(param)) continue;
    const bool has_sum = gradients_.in_sum(param);
    gradients_.set_in_grad(param, false);
    gradients_.set_in_sum(param, true);
    const auto [begin, numel, offset] = store_.layout().shard_of(param);
    if (numel == 0) continue;
    if (has_sum) {
      compute.add_to_float(to + offset, element_at(from, offset, spec.dtype), spec.dtype, numel);
    } else {
      compute.cast_to_float(element_at(from, offset, spec.dtype), spec.dtype, to + offset, numel);
    }
  }
  on_device ? sum_record.set_on_device() : sum_record.set_on_host();
  grad_hold.release();
  sum_hold.release();
  discard_gradients(chunk);
  statistics_.forget(chunk);
}

double GradientFlow::sum_of_squares(const std::vector<ParamId>& left_out) {
  if (gradients_.any_in_sum()) add_to_sums();
  std::vector<ParamId> params;
  for (ChunkId chunk = 0; chunk < store_.num_chunks(); ++chunk) {
    const std::vector<ParamId> here = gradients_.in_chunk(chunk);
    if (!here.empty() && !statistics_.has(chunk)) statistics_.compute({chunk, gradients_.source(chunk)}, here);
    for (ParamId param : here) {
      if (!std::binary_search(left_out.begin(), left_out.end(), param)) params.push_back(param);
    }
  }
  std::sort(params.begin(), params.end());
  {
    const TraceScope stall(memory_.tracer(), {Track::kStall, StallCause::kCollective});
    memory_.backend().wait(Queue::kCompute, last_scatter_);
  }
  return statistics_.sum(params);
}

}  // namespace patrickstar
