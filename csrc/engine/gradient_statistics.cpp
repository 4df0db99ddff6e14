#include "engine/gradient_statistics.h"

#include <cmath>
#include <optional>
#include <string>
#include <utility>

#include "collective/message.h"

namespace patrickstar {

namespace {

const void* at(const void* data, int64_t offset, DType dtype) {
  return static_cast<const char*>(data) + offset * element_size(dtype);
}

}  // namespace

GradientStatistics::GradientStatistics(Pager& pager, Collectives& collectives)
    : pager_(pager), memory_(pager.memory()), collectives_(collectives) {
  lay_out();
}

void GradientStatistics::lay_out() {
  where_.assign(static_cast<size_t>(memory_.layout().num_chunks()), Where::kNowhere);
  offsets_.clear();
  int64_t offset = 0;
  for (const ParamSpec& param : memory_.layout().params()) {
    offsets_.push_back(offset);
    offset += param.trainable ? optim::num_square_partials(param.numel) : 0;
  }
  partials_.assign(static_cast<size_t>(offset), 0.0);
}

void GradientStatistics::cover_trainable() {
  memory_.backend().synchronize(memory_.backend().record(Queue::kCompute));
  if (memory_.layout().is_sharded()) memory_.backend().synchronize(memory_.backend().record(Queue::kScatter));
  device_partials_.reset();
  lay_out();
}

void GradientStatistics::prepare_device() {
  if (!memory_.device().is_cuda() || device_partials_) return;
  device_partials_ = memory_.slots().acquire(static_cast<int64_t>(partials_.size() * sizeof(double)), SlotFit::kExact,
                                             OverLimit::kAllow);
}

double* GradientStatistics::device_partials() {
  prepare_device();
  return device_partials_ ? static_cast<double*>(device_partials_.data) : partials_.data();
}

std::vector<GradientStatistics::Part> GradientStatistics::parts(const std::vector<ParamId>& params, const void* data,
                                                                DType dtype, double* partials) const {
  std::vector<Part> result;
  for (ParamId param : params) {
    const ParamShard shard = memory_.layout().shard_of(param);
    if (shard.numel == 0) continue;
    const int64_t first = offsets_[static_cast<size_t>(param)] + shard.begin / optim::kSquaresBlock;
    result.push_back({at(data, shard.offset, dtype), shard.numel, partials + first});
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
  const void* data = on_device ? record.slot.data : record.block.data;
  for (const Part& part : parts(params, data, dtype, on_device ? device_partials() : partials_.data())) {
    compute.sum_squares(part.data, dtype, part.numel, part.partials);
  }
  where_[static_cast<size_t>(source.chunk)] = on_device ? Where::kDevice : Where::kHost;
}

void GradientStatistics::enqueue_scattered(ChunkId chunk, const void* data) {
  const ChunkSpec& spec = memory_.layout().chunk(chunk);
  memory_.backend().enqueue(Queue::kScatter, [&compute = memory_.device_compute(), dtype = spec.dtype,
                                              parts = parts(spec.params, data, spec.dtype, device_partials())] {
    for (const Part& part : parts) compute.sum_squares(part.data, dtype, part.numel, part.partials);
  });
  where_[static_cast<size_t>(chunk)] = Where::kDevice;
}

double GradientStatistics::sum(const std::vector<ParamId>& params) {
  std::vector<double> from_device;
  if (device_partials_) {
    const TraceScope stall(memory_.tracer(), {Track::kStall, StallCause::kNorm});
    from_device.resize(partials_.size());
    memory_.backend().copy(Queue::kCompute, from_device.data(), device_partials_.data,
                           static_cast<int64_t>(partials_.size() * sizeof(double)));
    memory_.backend().synchronize(memory_.backend().record(Queue::kCompute));
  }
  const bool sharded = memory_.layout().is_sharded();
  return sharded ? sum_over_ranks(params, from_device) : sum_in_order(params, from_device);
}

// Of this rank's part of a parameter.
GradientStatistics::Partials GradientStatistics::partials_of(ParamId param,
                                                             const std::vector<double>& from_device) const {
  const Layout& layout = memory_.layout();
  const ParamShard shard = layout.shard_of(param);
  const bool on_device = where_[static_cast<size_t>(layout.placement(param).chunk)] == Where::kDevice;
  const double* first = (on_device && device_partials_ ? from_device : partials_).data() +
                        offsets_[static_cast<size_t>(param)] + shard.begin / optim::kSquaresBlock;
  return {first, first + optim::num_square_partials(shard.numel)};
}

double GradientStatistics::sum_in_order(const std::vector<ParamId>& params,
                                        const std::vector<double>& from_device) const {
  double total = 0;
  for (ParamId param : params) {
    const Partials partials = partials_of(param, from_device);
    double sum = 0;
    for (const double* value = partials.begin; value != partials.end; ++value) sum += *value;
    total += sum;
  }
  return total;
}

// [Note: a sum that knows no order] Which partials a rank has depends on the chunk size, and the sum must not. Sums are
// carried with their rounding errors (Knuth's two-sum), so that they are right to some 100 bits before the last
// rounding.
double GradientStatistics::sum_over_ranks(const std::vector<ParamId>& params, const std::vector<double>& from_device) {
  double high = 0;
  double low = 0;
  const auto add = [&high, &low](double value) {
    const double sum = high + value;
    const double part = sum - high;
    low += (high - (sum - part)) + (value - part);
    high = sum;
  };
  for (ParamId param : params) {
    const Partials partials = partials_of(param, from_device);
    for (const double* value = partials.begin; value != partials.end; ++value) add(*value);
  }
  const std::string mine = MessageWriter().add(high).add(low).str();
  high = low = 0;
  constexpr const char* kWhat = "the gradients' norm";
  for (const std::string& message : collectives_.exchange(kWhat, mine)) {
    MessageReader reader(message, kWhat);
    add(reader.next<double>());
    add(reader.next<double>());
    reader.finish();
  }
  // Not finite anywhere: low may be NaN where high is infinite.
  return std::isfinite(high) ? high + low : high;
}

}  // namespace patrickstar
