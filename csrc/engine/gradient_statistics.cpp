#include "engine/gradient_statistics.h"

#include <optional>
#include <string>
#include <utility>

#include "collective/message.h"

namespace patrickstar {

GradientStatistics::GradientStatistics(Pager& pager, Collectives& collectives, Extent extent)
    : pager_(pager), memory_(pager.memory()), collectives_(collectives), extent_(extent) {
  lay_out();
}

// The elements that this rank adds up, with their offset in the source array.
ParamShard GradientStatistics::extent_of(ParamId param) const {
  const Layout& layout = memory_.layout();
  if (extent_ == Extent::kShard) return layout.shard_of(param);
  return {0, layout.param(param).numel, layout.placement(param).offset};
}

void GradientStatistics::lay_out() {
  const Layout& layout = memory_.layout();
  where_.assign(static_cast<size_t>(layout.num_chunks()), Where::kNowhere);
  ranges_.clear();
  num_partials_ = 0;
  for (ParamId param = 0; param < layout.num_params(); ++param) {
    ranges_.emplace_back();
    if (!layout.param(param).trainable) continue;
    const ParamShard shard = extent_of(param);
    ranges_.back() = {num_partials_ + shard.begin / optim::kSquaresBlock, optim::num_square_partials(shard.numel)};
    num_partials_ += optim::num_square_partials(layout.param(param).numel);
  }
  partials_.clear();
}

void GradientStatistics::cover_trainable() {
  memory_.backend().synchronize(memory_.backend().record(Queue::kCompute));
  if (memory_.layout().has_other_ranks()) memory_.backend().synchronize(memory_.backend().record(Queue::kScatter));
  device_partials_.reset();
  lay_out();
}

void GradientStatistics::prepare_device() {
  if (!memory_.device().is_cuda() || device_partials_) return;
  const auto num_ranges = static_cast<int64_t>(ranges_.size());
  const auto range_bytes = num_ranges * static_cast<int64_t>(sizeof(optim::PartialsRange));
  const auto sum_bytes = num_ranges * static_cast<int64_t>(sizeof(optim::WideSum));
  const auto partial_bytes = num_partials_ * static_cast<int64_t>(sizeof(double));
  device_partials_ = memory_.device_buffers().acquire(partial_bytes + range_bytes + sum_bytes, DeviceBufferFit::kExact,
                                                      OverLimit::kAllow);
  memory_.backend().copy(Queue::kCompute, device_arrays().ranges, ranges_.data(), range_bytes);
}

GradientStatistics::DeviceArrays GradientStatistics::device_arrays() const {
  auto* partials = static_cast<double*>(device_partials_.data);
  auto* ranges = reinterpret_cast<optim::PartialsRange*>(partials + num_partials_);
  return {partials, ranges, reinterpret_cast<optim::WideSum*>(ranges + ranges_.size())};
}

double* GradientStatistics::partials(Tier tier) {
  if (tier == Tier::kDevice) prepare_device();
  if (tier == Tier::kDevice && device_partials_) return device_arrays().partials;
  partials_.resize(static_cast<size_t>(num_partials_));
  return partials_.data();
}

std::vector<GradientStatistics::Part> GradientStatistics::parts(const std::vector<ParamId>& params, const void* data,
                                                                DType dtype, double* partials) const {
  std::vector<Part> result;
  for (ParamId param : params) {
    const ParamShard shard = extent_of(param);
    if (shard.numel == 0) continue;
    const int64_t first = ranges_[static_cast<size_t>(param)].first;
    result.push_back({element_at(data, shard.offset, dtype), shard.numel, partials + first});
  }
  return result;
}

void GradientStatistics::compute(ArrayId source, const std::vector<ParamId>& params) {
  const ArrayRecord& record = memory_.array(source);
  const DType dtype = source.kind == ArrayKind::kGradSum ? DType::kFloat32 : memory_.layout().chunk(source.chunk).dtype;
  const bool on_device = record.on_device;
  if (on_device) {
    memory_.await_on_device(source);
  } else {
    pager_.bring_to_host(source);
  }
  std::optional<TraceScope> stall;
  if (!on_device) stall.emplace(memory_.tracer(), SpanLabel{Track::kStall, StallCause::kHostWork, source});
  optim::Compute& compute = on_device ? memory_.device_compute() : memory_.host_compute();
  const void* data = on_device ? record.device_buffer.data : record.block.data;
  for (const Part& part : parts(params, data, dtype, partials(on_device ? Tier::kDevice : Tier::kHost))) {
    compute.sum_squares(part.data, dtype, part.numel, part.partials);
  }
  where_[static_cast<size_t>(source.chunk)] = on_device ? Where::kDevice : Where::kHost;
}

void GradientStatistics::enqueue_scattered(ChunkId chunk, const void* data) {
  const ChunkSpec& spec = memory_.layout().chunk(chunk);
  memory_.backend().enqueue(Queue::kScatter, [&compute = memory_.device_compute(), dtype = spec.dtype,
                                              parts = parts(spec.params, data, spec.dtype, partials(Tier::kDevice))] {
    for (const Part& part : parts) compute.sum_squares(part.data, dtype, part.numel, part.partials);
  });
  where_[static_cast<size_t>(chunk)] = Where::kDevice;
}

std::vector<optim::WideSum> GradientStatistics::sums_on_device() {
  std::vector<optim::WideSum> sums(ranges_.size());
  const TraceScope stall(memory_.tracer(), {Track::kStall, StallCause::kNorm});
  const DeviceArrays arrays = device_arrays();
  memory_.device_compute().add_up(arrays.partials, arrays.ranges, static_cast<int64_t>(ranges_.size()), arrays.sums);
  memory_.backend().copy(Queue::kCompute, sums.data(), arrays.sums,
                         static_cast<int64_t>(sums.size() * sizeof(optim::WideSum)));
  memory_.backend().synchronize(memory_.backend().record(Queue::kCompute));
  return sums;
}

double GradientStatistics::sum(const std::vector<ParamId>& params, double more) {
  const std::vector<optim::WideSum> from_device = device_partials_ ? sums_on_device() : std::vector<optim::WideSum>();
  optim::WideSum total;
  total.add(more);
  for (ParamId param : params) {
    const auto index = static_cast<size_t>(param);
    const bool is_on_device = where_[static_cast<size_t>(memory_.layout().placement(param).chunk)] == Where::kDevice;
    optim::WideSum sum;
    if (is_on_device && device_partials_) {
      sum = from_device[index];
    } else {
      memory_.host_compute().add_up(partials_.data(), &ranges_[index], 1, &sum);
    }
    total.add(sum);
  }
  return memory_.layout().has_other_ranks() ? sum_over_ranks(total) : total.value();
}

double GradientStatistics::sum_over_ranks(const optim::WideSum& mine) {
  const std::string message = MessageWriter().add(mine.high).add(mine.low).str();
  optim::WideSum total;
  constexpr const char* kWhat = "the gradients' norm";
  for (const std::string& others : collectives_.exchange(kWhat, message)) {
    MessageReader reader(others, kWhat);
    total.add(reader.next<double>());
    total.add(reader.next<double>());
    reader.finish();
  }
  return total.value();
}

}  // namespace patrickstar
