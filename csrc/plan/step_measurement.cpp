#include "plan/step_measurement.h"

#include <algorithm>
#include <set>

namespace patrickstar {

namespace {

constexpr double kUnseenGbps = 1e9;
constexpr double kUnseenParamsPerSecond = 1e18;
// Of the largest transfer: those that a chunk's shorter neighbours make are ruled by latency.
constexpr double kLargeShare = 0.5;

double seconds_of(const TracedSpan& span) { return span.end_seconds - span.begin_seconds; }

double median_gbps(const StepTrace& trace, Track track) {
  int64_t largest = 0;
  for (const TracedSpan& span : trace.spans) {
    if (span.label.track == track) largest = std::max(largest, span.label.num_bytes);
  }
  std::vector<double> rates;
  for (const TracedSpan& span : trace.spans) {
    const auto num_bytes = static_cast<double>(span.label.num_bytes);
    if (span.label.track != track || num_bytes < kLargeShare * static_cast<double>(largest)) continue;
    if (seconds_of(span) > 0) rates.push_back(num_bytes / seconds_of(span) / 1e9);
  }
  if (rates.empty()) return kUnseenGbps;
  const auto middle = rates.begin() + static_cast<std::ptrdiff_t>(rates.size() / 2);
  std::nth_element(rates.begin(), middle, rates.end());
  return *middle;
}

// `share(label)`: how much of an update a span is.
template <class Share>
double params_per_second(const StepTrace& trace, const std::set<Track>& tracks, const Share& share) {
  double numel = 0;
  double seconds = 0;
  for (const TracedSpan& span : trace.spans) {
    // Updates of the step before are clipped.
    if (tracks.count(span.label.track) == 0 || span.owner != SpanOwner::kThisStep) continue;
    numel += share(span.label) * static_cast<double>(span.label.numel);
    seconds += seconds_of(span);
  }
  return numel > 0 && seconds > 0 ? numel / seconds : kUnseenParamsPerSecond;
}

// In updates of one pass.
double host_adam_params_per_second(const StepTrace& trace) {
  std::set<ChunkId> in_two_passes;
  for (const TracedSpan& span : trace.spans) {
    if (span.label.track == Track::kHostStates) in_two_passes.insert(span.label.array.chunk);
  }
  const auto share = [&](const SpanLabel& label) {
    if (label.track == Track::kHostStates) return kStatesPass;
    if (label.track == Track::kHostOpen) return 0.0;  // counted where they were left open
    return in_two_passes.count(label.array.chunk) == 0 ? 1.0 : kParamPass;
  };
  return params_per_second(trace, {Track::kHostAdam, Track::kHostStates, Track::kHostOpen, Track::kDiskAdam}, share);
}

// Waits that the simulator knows; it does not know that the calling thread sums gradients or derives values.
bool is_simulated_stall(const TracedSpan& span) {
  return span.label.track == Track::kStall && span.label.cause != StallCause::kNorm &&
         span.label.cause != StallCause::kHostWork;
}

double synchronize_seconds(const StepTrace& trace) {
  double seconds = trace.seconds - trace.optimizer_begin_seconds;
  if (!trace.moments.empty()) seconds += trace.moments.front().begin_seconds;
  for (const TracedSpan& span : trace.spans) {
    if (span.begin_seconds < trace.optimizer_begin_seconds) continue;
    if (span.label.track == Track::kDeviceAdam || is_simulated_stall(span)) seconds -= seconds_of(span);
  }
  return std::max(seconds, 0.0);
}

// How far the calling thread ran ahead of the device at most.
double launch_ahead_seconds(const StepTrace& trace) {
  double ahead = 0;
  for (const TracedMoment& moment : trace.moments)
    ahead = std::max(ahead, moment.begin_seconds - moment.launched_seconds);
  return ahead;
}

}  // namespace

Rates measured_rates(const StepTrace& trace) {
  Rates rates;
  rates.upload_gbps = median_gbps(trace, Track::kUpload);
  rates.download_gbps = median_gbps(trace, Track::kDownload);
  rates.gather_gbps = median_gbps(trace, Track::kGather);
  rates.scatter_gbps = median_gbps(trace, Track::kScatter);
  rates.disk_read_gbps = median_gbps(trace, Track::kDiskRead);
  rates.disk_write_gbps = median_gbps(trace, Track::kDiskWrite);
  rates.host_adam_params_per_second = host_adam_params_per_second(trace);
  rates.device_adam_params_per_second =
      params_per_second(trace, {Track::kDeviceAdam}, [](const SpanLabel&) { return 1.0; });
  rates.synchronize_seconds = synchronize_seconds(trace);
  rates.launch_ahead_seconds = launch_ahead_seconds(trace);
  return rates;
}

std::vector<double> measured_compute_seconds(const StepTrace& trace) {
  std::vector<double> begins;
  std::vector<double> seconds;
  for (const TracedMoment& moment : trace.moments) {
    begins.push_back(moment.begin_seconds);
    seconds.push_back(moment.seconds);
  }
  for (const TracedSpan& span : trace.spans) {
    if (!is_simulated_stall(span) || span.begin_seconds >= trace.optimizer_begin_seconds) continue;
    const auto next = std::upper_bound(begins.begin(), begins.end(), span.begin_seconds);
    if (next != begins.begin()) seconds[static_cast<size_t>(next - begins.begin()) - 1] -= seconds_of(span);
  }
  for (double& value : seconds) value = std::max(value, 0.0);
  return seconds;
}

}  // namespace patrickstar
