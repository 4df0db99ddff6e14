#include "runtime/gradient_flow.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "common/check.h"

namespace patrickstar {

namespace {

const char* offset_bytes(const void* data, int64_t offset, DType dtype) {
  return static_cast<const char*>(data) + offset * element_size(dtype);
}
char* offset_bytes(void* data, int64_t offset, DType dtype) {
  return static_cast<char*>(data) + offset * element_size(dtype);
}

}  // namespace

GradientFlow::GradientFlow(Core core, Pager& pager, AccessTracker& tracker)
    : core_(core),
      pager_(pager),
      tracker_(tracker),
      has_grad_(static_cast<size_t>(core.store.layout().num_params()), 0),
      in_slot_(has_grad_),
      has_sum_(has_grad_),
      progress_(static_cast<size_t>(core.store.layout().num_chunks())),
      statistics_(core, pager),
      scattered_(progress_.size(), 0) {
  for (ChunkId chunk = 0; chunk < core.store.layout().num_chunks(); ++chunk) {
    progress(chunk).expected_folds = static_cast<int>(core.store.layout().chunk(chunk).params.size());
  }
  tracker_.set_backward_release_listener([this](ChunkId chunk) { on_backward_release(chunk); });
  core_.collectives.set_scatter([this](ChunkId chunk) { scatter(chunk); });
}

GradientFlow::~GradientFlow() { tracker_.set_backward_release_listener({}); }

void GradientFlow::begin_backward() {
  in_backward_ = true;
  if (num_backwards_ > 0) {
    accumulates_ = true;
    add_to_sums();
  }
  ++num_backwards_;
  for (ChunkProgress& chunk : progress_) {
    chunk.folds = 0;
    chunk.complete = false;
  }
  std::fill(scattered_.begin(), scattered_.end(), uint8_t{0});
}

void GradientFlow::fold(ParamId param, const void* data) {
  const Placement place = core_.store.layout().placement(param);
  const ChunkSpec& chunk = core_.store.layout().chunk(place.chunk);
  const ArrayId grad{place.chunk, ArrayKind::kGrad};
  PS_CHECK(in_backward_, StateError,
           "loss.backward() was called; call model.backward(loss) instead, so that gradients are scaled and gathered");
  PS_CHECK(chunk.trainable, StateError, core_.store.param_name(param),
           " gets a gradient, but its chunk has no optimizer states yet; set requires_grad before the forward begins");
  ArrayRecord& record = core_.store.array(grad);
  if (!record.on_device) announce_change(place.chunk);
  ScopedHold hold(record);
  void* target = offset_bytes(pager_.open_for_write(grad), place.offset, chunk.dtype);
  hold.release();
  core_.recorder.add({grad, AccessMode::kWrite});
  const int64_t numel = core_.store.layout().param(param).numel;
  auto& present = in_slot_[static_cast<size_t>(param)];
  if (present) {
    core_.device_compute.add(target, data, chunk.dtype, numel);
  } else {
    core_.backend.copy(Queue::kCompute, target, data, numel * element_size(chunk.dtype));
  }
  present = 1;
  has_grad_[static_cast<size_t>(param)] = 1;
  statistics_.forget(place.chunk);
  if (!tracker_.is_held(param)) core_.store.move_param(param, State::kHoldAfterBwd);
  ChunkProgress& chunk_progress = progress(place.chunk);
  chunk_progress.complete = ++chunk_progress.folds == chunk_progress.expected_folds;
  maybe_retire(place.chunk);
}

void GradientFlow::on_backward_release(ChunkId chunk) { maybe_retire(chunk); }

void GradientFlow::maybe_retire(ChunkId chunk) {
  if (progress(chunk).complete && core_.store.is_dead(chunk)) retire(chunk);
}

void GradientFlow::retire(ChunkId chunk) {
  const ArrayId grad{chunk, ArrayKind::kGrad};
  const ArrayId param{chunk, ArrayKind::kParam};
  progress(chunk).complete = false;  // once
  if (!core_.store.array(grad).exists()) return;
  if (core_.store.layout().is_sharded()) {
    if (pager_.replays()) return scatter(chunk);
    note_needed_to_scatter(chunk);
    return core_.collectives.note_complete(chunk);
  }
  if (!statistics_.has(chunk) && !accumulates_) {
    statistics_.compute({chunk, source(chunk)}, params_with_gradient(chunk));
  }
  // The values are dead, and the gradient may take their place, unless another micro-batch or a later use is expected.
  if (!accumulates_ && pager_.next_use(param) == NextUse::kNever) pager_.discard(param);
  send_home(chunk);
}

// To the tier of the optimizer states.
void GradientFlow::send_home(ChunkId chunk) {
  if (!states_on_device(chunk)) {
    if (!pager_.push_out({chunk, core_.store.layout().grad_home()})) return;
    if (!core_.store.layout().is_sharded()) core_.recorder.add({{chunk, ArrayKind::kGrad}, AccessMode::kRetire});
  }
  if (!accumulates_ && retired_listener_) retired_listener_(chunk);
}

// A step that replays a plan scatters here, this one a little later, when there may be less tide ([Note: the least limit]).
void GradientFlow::note_needed_to_scatter(ChunkId chunk) {
  const ChunkStore& store = core_.store;
  int64_t held_bytes = 0;
  for (int index = 0; index < store.num_arrays(); ++index) {
    const ArrayId id = ArrayId::from_index(index);
    if (store.array(id).slot && store.array(id).holds > 0) held_bytes += store.num_bytes(id);
  }
  const int64_t grad_bytes = store.num_bytes({chunk, ArrayKind::kGrad});
  core_.backend.note_needed_payloads(held_bytes + 2 * grad_bytes + store.num_bytes({chunk, ArrayKind::kGradShard}));
}

// Where a parameter has no gradient here, another rank may have one.
void GradientFlow::fill_missing(ChunkId chunk) {
  const Layout& layout = core_.store.layout();
  const ChunkSpec& spec = layout.chunk(chunk);
  const ArrayId grad{chunk, ArrayKind::kGrad};
  ArrayRecord& record = core_.store.array(grad);
  const bool fresh = !record.exists();
  char* data = static_cast<char*>(pager_.open_for_write(grad));
  if (fresh) return core_.backend.fill_zero(Queue::kCompute, data, spec.num_bytes(grad.kind));
  for (ParamId param : spec.params) {
    if (in_slot_[static_cast<size_t>(param)]) continue;
    core_.backend.fill_zero(Queue::kCompute, offset_bytes(data, layout.placement(param).offset, spec.dtype),
                            layout.param(param).numel * element_size(spec.dtype));
  }
}

void GradientFlow::scatter(ChunkId chunk) {
  const ChunkSpec& spec = core_.store.layout().chunk(chunk);
  const ArrayId grad{chunk, ArrayKind::kGrad};
  const ArrayId shard{chunk, ArrayKind::kGradShard};
  ArrayRecord& grad_record = core_.store.array(grad);
  ArrayRecord& shard_record = core_.store.array(shard);
  const bool again = std::exchange(scattered_[static_cast<size_t>(chunk)], uint8_t{1}) != 0;
  announce_change(chunk);
  ScopedHold grad_hold(grad_record);
  ScopedHold shard_hold(shard_record);
  fill_missing(chunk);
  void* sum = pager_.open_for_write(shard);
  Slot scratch = pager_.take_slot(spec.num_bytes(grad.kind) + (again ? spec.num_bytes(shard.kind) : 0), grad);
  void* more = static_cast<char*>(scratch.data) + spec.num_bytes(grad.kind);
  statistics_.prepare_device();
  core_.transfer.await_slot(Queue::kScatter, scratch);
  core_.transfer.await_slot(Queue::kScatter, shard_record.slot);
  core_.backend.wait(Queue::kScatter, core_.backend.record(Queue::kCompute));
  const int64_t others_bytes = spec.num_bytes(grad.kind) - spec.num_bytes(shard.kind);
  {
    const TraceScope span(core_.tracer, {Track::kScatter, StallCause::kNone, grad, others_bytes});
    core_.backend.enqueue(Queue::kScatter,
                          [&group = core_.collectives.scatter_group(), whole = grad_record.slot.data,
                           to = again ? more : sum, scratch = scratch.data, numel = spec.shard_numel,
                           dtype = spec.dtype] { group.reduce_scatter_mean(whole, to, scratch, numel, dtype); });
  }
  if (again) {
    core_.backend.enqueue(Queue::kScatter, [&compute = core_.device_compute, sum, more, dtype = spec.dtype,
                                            numel = spec.shard_numel] { compute.add(sum, more, dtype, numel); });
  }
  if (!accumulates_) statistics_.enqueue_scattered(chunk, sum);
  core_.counters.scattered_bytes += others_bytes;
  last_scatter_ = core_.backend.record(Queue::kScatter);
  shard_record.device_ready = last_scatter_;
  shard_record.slot.busy = {last_scatter_, nullptr};
  grad_record.slot.busy.copied = last_scatter_;
  scratch.busy = {last_scatter_, nullptr};
  core_.slots.release(std::move(scratch));
  shard_hold.release();
  grad_hold.release();
  pager_.discard(grad);
  core_.recorder.add({grad, AccessMode::kRetire});
  for (ParamId param : spec.params) in_slot_[static_cast<size_t>(param)] = 0;
  const ArrayId param{chunk, ArrayKind::kParam};
  const bool dead = core_.store.is_dead(chunk) && core_.store.array(param).holds == 0;
  if (!accumulates_ && dead && pager_.next_use(param) == NextUse::kNever) {
    pager_.discard(param);
    pager_.discard({chunk, ArrayKind::kParamShard});  // the gradient takes its place
  }
  send_home(chunk);
}

void GradientFlow::scatter_rest() {
  if (!pager_.replays()) core_.collectives.finish_phase();
  core_.collectives.abandon_phase();
  std::vector<uint8_t> flags = has_grad_;
  for (ChunkId chunk = 0; chunk < core_.store.layout().num_chunks(); ++chunk) {
    flags.push_back(core_.store.array({chunk, ArrayKind::kGrad}).exists());
  }
  core_.collectives.any_over_ranks(flags);
  for (ParamId param = 0; param < core_.store.layout().num_params(); ++param) {
    auto& here = has_grad_[static_cast<size_t>(param)];
    if (here == flags[static_cast<size_t>(param)]) continue;
    announce_change(core_.store.layout().placement(param).chunk);  // an update that began without it is another one
    here = 1;
  }
  for (ChunkId chunk = 0; chunk < core_.store.layout().num_chunks(); ++chunk) {
    if (flags[has_grad_.size() + static_cast<size_t>(chunk)] != 0) scatter(chunk);
  }
}

void GradientFlow::announce_change(ChunkId chunk) {
  if (change_listener_) change_listener_(chunk);
}

void GradientFlow::end_backward() {
  in_backward_ = false;
  const Layout& layout = core_.store.layout();
  for (ChunkId chunk = 0; chunk < layout.num_chunks(); ++chunk) {
    if (!layout.chunk(chunk).trainable || !core_.store.array({chunk, ArrayKind::kGrad}).exists()) continue;
    for (ParamId param : layout.chunk(chunk).params) {
      if (core_.store.param_state(param) != State::kFree) core_.store.move_param(param, State::kHoldAfterBwd);
    }
    ChunkProgress& chunk_progress = progress(chunk);
    if (chunk_progress.folds > 0) {
      chunk_progress.expected_folds = chunk_progress.folds;
      const bool late = !layout.is_sharded() && !core_.store.array({chunk, ArrayKind::kGrad}).on_host;
      if (late) retire(chunk);
    }
  }
  if (layout.is_sharded()) scatter_rest();
}

void GradientFlow::abort_backward() {
  in_backward_ = false;
  for (ChunkId chunk = 0; chunk < core_.store.layout().num_chunks(); ++chunk) {
    announce_change(chunk);
    discard_gradients(chunk);
    for (ParamId param : core_.store.layout().chunk(chunk).params) has_grad_[static_cast<size_t>(param)] = 0;
    statistics_.forget(chunk);
  }
  const bool sums = std::any_of(has_sum_.begin(), has_sum_.end(), [](uint8_t has) { return has != 0; });
  num_backwards_ = sums ? std::max(num_backwards_ - 1, 1) : 0;
}

void GradientFlow::clear() {
  if (num_backwards_ > 0) accumulates_ = num_backwards_ > 1;
  for (ChunkId chunk = 0; chunk < core_.store.layout().num_chunks(); ++chunk) forget(chunk);
  num_backwards_ = 0;
}

void GradientFlow::clear_param(ParamId param) {
  announce_change(core_.store.layout().placement(param).chunk);
  has_grad_[static_cast<size_t>(param)] = 0;
  has_sum_[static_cast<size_t>(param)] = 0;
  statistics_.forget(core_.store.layout().placement(param).chunk);
}

void GradientFlow::note_rewritten(ChunkId chunk) {
  announce_change(chunk);
  statistics_.forget(chunk);
}

void GradientFlow::forget(ChunkId chunk) {
  announce_change(chunk);
  discard_gradients(chunk);
  pager_.discard({chunk, ArrayKind::kGradSum});
  statistics_.forget(chunk);
  for (ParamId param : core_.store.layout().chunk(chunk).params) {
    has_grad_[static_cast<size_t>(param)] = 0;
    has_sum_[static_cast<size_t>(param)] = 0;
  }
}

void GradientFlow::discard_gradients(ChunkId chunk) {
  pager_.discard({chunk, ArrayKind::kGrad});
  pager_.discard({chunk, core_.store.layout().grad_home()});
  for (ParamId param : core_.store.layout().chunk(chunk).params) in_slot_[static_cast<size_t>(param)] = 0;
}

bool GradientFlow::states_on_device(ChunkId chunk) const {
  return core_.store.array({chunk, ArrayKind::kMaster}).on_device;
}

bool GradientFlow::has_gradient_in(ChunkId chunk) const {
  const auto& params = core_.store.layout().chunk(chunk).params;
  return std::any_of(params.begin(), params.end(), [this](ParamId param) { return has_gradient(param); });
}

ArrayKind GradientFlow::source(ChunkId chunk) const {
  const bool sums = core_.store.array({chunk, ArrayKind::kGradSum}).exists();
  return sums ? ArrayKind::kGradSum : core_.store.layout().grad_home();
}

void GradientFlow::add_to_sums() {
  for (ChunkId chunk = 0; chunk < core_.store.layout().num_chunks(); ++chunk) {
    if (core_.store.array({chunk, core_.store.layout().grad_home()}).exists()) add_to_sum(chunk);
  }
}

void GradientFlow::add_to_sum(ChunkId chunk) {
  announce_change(chunk);
  const ArrayId grad{chunk, core_.store.layout().grad_home()};
  const ArrayId sum{chunk, ArrayKind::kGradSum};
  ArrayRecord& grad_record = core_.store.array(grad);
  ArrayRecord& sum_record = core_.store.array(sum);
  const ChunkSpec& spec = core_.store.layout().chunk(chunk);
  const bool on_device = sum_record.exists() ? sum_record.on_device : states_on_device(chunk);
  ScopedHold grad_hold(grad_record);
  ScopedHold sum_hold(sum_record);
  if (on_device) {
    pager_.bring(grad);
    pager_.open_for_write(sum);
  } else {
    pager_.bring_to_host(grad);
    pager_.ensure_block(sum);
    core_.transfer.await_on_host(sum);
  }
  std::optional<TraceScope> stall;
  if (!on_device) stall.emplace(core_.tracer, SpanLabel{Track::kStall, StallCause::kHostWork, sum});
  optim::Compute& compute = on_device ? core_.device_compute : core_.host_compute;
  const void* from = on_device ? grad_record.slot.data : grad_record.block.data;
  auto* to = static_cast<float*>(on_device ? sum_record.slot.data : sum_record.block.data);
  for (ParamId param : spec.params) {
    if (!std::exchange(has_grad_[static_cast<size_t>(param)], uint8_t{0})) continue;
    const bool has_sum = std::exchange(has_sum_[static_cast<size_t>(param)], uint8_t{1}) != 0;
    const auto [begin, numel, offset] = core_.store.layout().shard_of(param);
    if (numel == 0) continue;
    if (has_sum) {
      compute.add_to_float(to + offset, offset_bytes(from, offset, spec.dtype), spec.dtype, numel);
    } else {
      compute.cast_to_float(offset_bytes(from, offset, spec.dtype), spec.dtype, to + offset, numel);
    }
  }
  if (on_device) {
    pager_.set_on_device(sum);
  } else {
    pager_.set_on_host(sum);
  }
  grad_hold.release();
  sum_hold.release();
  discard_gradients(chunk);
  statistics_.forget(chunk);
}

std::vector<ParamId> GradientFlow::params_with_gradient(ChunkId chunk) const {
  std::vector<ParamId> params;
  for (ParamId param : core_.store.layout().chunk(chunk).params) {
    if (has_gradient(param)) params.push_back(param);
  }
  return params;
}

double GradientFlow::sum_of_squares() {
  if (std::any_of(has_sum_.begin(), has_sum_.end(), [](uint8_t has) { return has != 0; })) add_to_sums();
  std::vector<ParamId> params;
  for (ChunkId chunk = 0; chunk < core_.store.layout().num_chunks(); ++chunk) {
    const std::vector<ParamId> here = params_with_gradient(chunk);
    if (!here.empty() && !statistics_.has(chunk)) statistics_.compute({chunk, source(chunk)}, here);
    params.insert(params.end(), here.begin(), here.end());
  }
  std::sort(params.begin(), params.end());
  {
    const TraceScope stall(core_.tracer, {Track::kStall, StallCause::kCollective});
    core_.backend.wait(Queue::kCompute, last_scatter_);
  }
  return statistics_.sum(params);
}

}  // namespace patrickstar
