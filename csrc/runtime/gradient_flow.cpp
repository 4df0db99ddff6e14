#include "runtime/gradient_flow.h"

#include <algorithm>
#include <cstring>
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
      has_sum_(has_grad_),
      progress_(static_cast<size_t>(core.store.layout().num_chunks())),
      statistics_(progress_.size(), Statistics::kNone) {
  int64_t offset = 0;
  for (const ParamSpec& param : core.store.layout().params()) {
    partial_offsets_.push_back(offset);
    offset += param.trainable ? optim::num_square_partials(param.numel) : 0;
  }
  partials_.resize(static_cast<size_t>(offset));
  for (ChunkId chunk = 0; chunk < core.store.layout().num_chunks(); ++chunk) {
    progress(chunk).expected_folds = static_cast<int>(core.store.layout().chunk(chunk).params.size());
  }
  tracker_.set_backward_release_listener([this](ChunkId chunk) { on_backward_release(chunk); });
}

GradientFlow::~GradientFlow() {
  tracker_.set_backward_release_listener({});
  core_.slots.release(std::exchange(device_partials_, {}));
}

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
}

void GradientFlow::fold(ParamId param, const void* data) {
  const Placement place = core_.store.layout().placement(param);
  const ChunkSpec& chunk = core_.store.layout().chunk(place.chunk);
  const ArrayId grad{place.chunk, ArrayKind::kGrad};
  PS_CHECK(in_backward_, StateError,
           "loss.backward() was called; call model.backward(loss) instead, so that gradients are scaled and gathered");
  PS_CHECK(chunk.trainable, StateError, core_.store.param_name(param),
           " was frozen when the engine was built and now gets a gradient; build the engine with it trainable and "
           "set requires_grad to False afterwards instead");
  ArrayRecord& record = core_.store.array(grad);
  if (!record.on_device) announce_change(place.chunk);
  ++record.holds;
  void* target = offset_bytes(pager_.open_for_write(grad), place.offset, chunk.dtype);
  --record.holds;
  core_.recorder.add({grad, AccessMode::kWrite});
  const int64_t numel = core_.store.layout().param(param).numel;
  auto& present = has_grad_[static_cast<size_t>(param)];
  if (present) {
    core_.device_compute.add(target, data, chunk.dtype, numel);
  } else {
    core_.backend.copy(Queue::kCompute, target, data, numel * element_size(chunk.dtype));
  }
  present = 1;
  statistics_[static_cast<size_t>(place.chunk)] = Statistics::kNone;
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
  if (statistics_[static_cast<size_t>(chunk)] == Statistics::kNone && !accumulates_) compute_statistics(chunk);
  // The values are dead, and the gradient may take their place, unless another micro-batch or a later use is expected.
  if (!accumulates_ && pager_.next_use(param) == NextUse::kNever) pager_.discard(param);
  if (states_on_device(chunk)) return;
  if (!pager_.push_out(grad)) return;
  core_.recorder.add({grad, AccessMode::kRetire});
  if (!accumulates_ && retired_listener_) retired_listener_(chunk);
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
      if (!core_.store.array({chunk, ArrayKind::kGrad}).on_host) retire(chunk);
    }
  }
}

void GradientFlow::abort_backward() {
  in_backward_ = false;
  for (ChunkId chunk = 0; chunk < core_.store.layout().num_chunks(); ++chunk) {
    announce_change(chunk);
    pager_.discard({chunk, ArrayKind::kGrad});
    for (ParamId param : core_.store.layout().chunk(chunk).params) has_grad_[static_cast<size_t>(param)] = 0;
    statistics_[static_cast<size_t>(chunk)] = Statistics::kNone;
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
  statistics_[static_cast<size_t>(core_.store.layout().placement(param).chunk)] = Statistics::kNone;
}

void GradientFlow::forget(ChunkId chunk) {
  announce_change(chunk);
  pager_.discard({chunk, ArrayKind::kGrad});
  pager_.discard({chunk, ArrayKind::kGradSum});
  statistics_[static_cast<size_t>(chunk)] = Statistics::kNone;
  for (ParamId param : core_.store.layout().chunk(chunk).params) {
    has_grad_[static_cast<size_t>(param)] = 0;
    has_sum_[static_cast<size_t>(param)] = 0;
  }
}

bool GradientFlow::states_on_device(ChunkId chunk) const {
  return core_.store.array({chunk, ArrayKind::kMaster}).on_device;
}

bool GradientFlow::has_gradient_in(ChunkId chunk) const {
  const auto& params = core_.store.layout().chunk(chunk).params;
  return std::any_of(params.begin(), params.end(), [this](ParamId param) { return has_gradient(param); });
}

ArrayKind GradientFlow::source(ChunkId chunk) const {
  return core_.store.array({chunk, ArrayKind::kGradSum}).exists() ? ArrayKind::kGradSum : ArrayKind::kGrad;
}

void GradientFlow::add_to_sums() {
  for (ChunkId chunk = 0; chunk < core_.store.layout().num_chunks(); ++chunk) {
    if (core_.store.array({chunk, ArrayKind::kGrad}).exists()) add_to_sum(chunk);
  }
}

void GradientFlow::add_to_sum(ChunkId chunk) {
  announce_change(chunk);
  const ArrayId grad{chunk, ArrayKind::kGrad};
  const ArrayId sum{chunk, ArrayKind::kGradSum};
  ArrayRecord& grad_record = core_.store.array(grad);
  ArrayRecord& sum_record = core_.store.array(sum);
  const ChunkSpec& spec = core_.store.layout().chunk(chunk);
  const bool on_device = sum_record.exists() ? sum_record.on_device : states_on_device(chunk);
  ++grad_record.holds;
  ++sum_record.holds;
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
    const int64_t offset = core_.store.layout().placement(param).offset;
    const int64_t numel = core_.store.layout().param(param).numel;
    if (std::exchange(has_sum_[static_cast<size_t>(param)], uint8_t{1})) {
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
  --grad_record.holds;
  --sum_record.holds;
  pager_.discard(grad);
  statistics_[static_cast<size_t>(chunk)] = Statistics::kNone;
}

double* GradientFlow::device_partials(ParamId param) {
  const auto offset = static_cast<size_t>(partial_offsets_[static_cast<size_t>(param)]);
  if (&core_.device_compute == &core_.host_compute) return partials_.data() + offset;
  if (!device_partials_) {
    device_partials_ = core_.slots.acquire(static_cast<int64_t>(partials_.size() * sizeof(double)), OverLimit::kAllow);
  }
  return static_cast<double*>(device_partials_.data) + offset;
}

void GradientFlow::compute_statistics(ChunkId chunk) {
  const ArrayId id{chunk, source(chunk)};
  const ArrayRecord& record = core_.store.array(id);
  const ChunkSpec& spec = core_.store.layout().chunk(chunk);
  const DType dtype = id.kind == ArrayKind::kGradSum ? DType::kFloat32 : spec.dtype;
  const bool on_device = record.on_device;
  if (on_device) {
    core_.transfer.await_on_device(id);
  } else {
    pager_.bring_to_host(id);
  }
  std::optional<TraceScope> stall;
  if (!on_device) stall.emplace(core_.tracer, SpanLabel{Track::kStall, StallCause::kHostWork, id});
  optim::Compute& compute = on_device ? core_.device_compute : core_.host_compute;
  const void* data = on_device ? record.slot.data : record.block.data;
  for (ParamId param : spec.params) {
    if (!has_gradient(param)) continue;
    const int64_t offset = core_.store.layout().placement(param).offset;
    double* partials =
        on_device ? device_partials(param) : partials_.data() + partial_offsets_[static_cast<size_t>(param)];
    compute.sum_squares(offset_bytes(data, offset, dtype), dtype, core_.store.layout().param(param).numel, partials);
  }
  statistics_[static_cast<size_t>(chunk)] = on_device ? Statistics::kOnDevice : Statistics::kOnHost;
}

double GradientFlow::sum_of_squares() {
  if (std::any_of(has_sum_.begin(), has_sum_.end(), [](uint8_t has) { return has != 0; })) add_to_sums();
  const Layout& layout = core_.store.layout();
  for (ChunkId chunk = 0; chunk < layout.num_chunks(); ++chunk) {
    if (statistics_[static_cast<size_t>(chunk)] == Statistics::kNone && has_gradient_in(chunk))
      compute_statistics(chunk);
  }
  std::vector<double> from_device;
  if (device_partials_) {
    const TraceScope stall(core_.tracer, {Track::kStall, StallCause::kNorm});
    from_device.resize(partials_.size());
    core_.backend.copy(Queue::kCompute, from_device.data(), device_partials_.data,
                       static_cast<int64_t>(partials_.size() * sizeof(double)));
    core_.backend.synchronize(core_.backend.record(Queue::kCompute));
  }
  double total = 0;
  for (ParamId param = 0; param < layout.num_params(); ++param) {
    if (!has_gradient(param)) continue;
    const bool on_device = statistics_[static_cast<size_t>(layout.placement(param).chunk)] == Statistics::kOnDevice;
    const std::vector<double>& partials = on_device && device_partials_ ? from_device : partials_;
    const auto begin = partials.begin() + partial_offsets_[static_cast<size_t>(param)];
    double sum = 0;
    for (auto value = begin; value != begin + optim::num_square_partials(layout.param(param).numel); ++value)
      sum += *value;
    total += sum;
  }
  return total;
}

}  // namespace patrickstar
