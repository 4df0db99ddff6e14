#include "plan/step_measurement.h"

#include <algorithm>
#include <set>

namespace patrickstar {

namespace {

// Bytes or parameters per second of lanes that a step did not use.
constexpr double kUnseenRate = 1e18;
// Transfers below this share of the largest one are dominated by latency and do not count. Not measured.
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
  if (rates.empty()) return kUnseenRate / 1e9;
  const auto middle = rates.begin() + static_cast<std::ptrdiff_t>(rates.size() / 2);
  std::nth_element(rates.begin(), middle, rates.end());
  return *middle;
}

// Seconds per parameter of one kind of pass.
class PassRate {
 public:
  void add(const TracedSpan& span) {
    numel_ += static_cast<double>(span.label.numel);
    add_seconds(span);
  }
  // Adds time to parameters that were added already.
  void add_seconds(const TracedSpan& span) { seconds_ += seconds_of(span); }
  bool is_seen() const { return numel_ > 0 && seconds_ > 0; }
  double numel() const { return numel_; }
  double seconds_per_param() const { return seconds_ / numel_; }

 private:
  double numel_ = 0;
  double seconds_ = 0;
};

// Spans of the step before are clipped at this step's beginning.
bool is_own_update(const TracedSpan& span, Track track) {
  return span.label.track == track && span.owner == SpanOwner::kThisStep;
}

double device_adam_params_per_second(const StepTrace& trace) {
  PassRate rate;
  for (const TracedSpan& span : trace.spans) {
    if (is_own_update(span, Track::kDeviceAdam)) rate.add(span);
  }
  return rate.is_seen() ? 1 / rate.seconds_per_param() : kUnseenRate;
}

// If a smaller share of parameters was updated in one pass, the one-pass rate follows from phase two, which moves
// almost the same bytes. Not measured.
constexpr double kEnoughWhole = 0.05;
// Plausible range of a phase relative to one pass; values outside came from disturbed steps. Not measured.
constexpr double kLeastPass = 0.25;
constexpr double kMostPass = 1.5;

void measure_host_adam(const StepTrace& trace, Rates& rates) {
  std::set<ChunkId> in_two_passes;
  for (const TracedSpan& span : trace.spans) {
    if (span.label.track == Track::kHostStates) in_two_passes.insert(span.label.array.chunk);
  }
  PassRate whole, param, states;
  for (const TracedSpan& span : trace.spans) {
    if (is_own_update(span, Track::kDiskAdam)) whole.add(span);
    if (is_own_update(span, Track::kHostStates)) states.add(span);
    if (is_own_update(span, Track::kHostOpen)) param.add_seconds(span);
    if (!is_own_update(span, Track::kHostAdam)) continue;
    (in_two_passes.count(span.label.array.chunk) == 0 ? whole : param).add(span);
  }
  rates.host_adam_params_per_second = kUnseenRate;
  if (!whole.is_seen() && !states.is_seen()) return;
  const bool enough = whole.is_seen() && whole.numel() >= kEnoughWhole * (whole.numel() + states.numel());
  const double seconds =
      enough || !states.is_seen() ? whole.seconds_per_param() : states.seconds_per_param() / rates.states_pass;
  rates.host_adam_params_per_second = 1 / seconds;
  if (!states.is_seen() || !param.is_seen()) return;
  rates.states_pass = std::clamp(states.seconds_per_param() / seconds, kLeastPass, kMostPass);
  rates.param_pass = std::clamp(param.seconds_per_param() / seconds, kLeastPass, kMostPass);
}

// Stalls that the simulator models. It does not model the norm, and gradient sums or derived values made by the calling
// thread.
bool is_simulated_stall(const TracedSpan& span) {
  return span.label.track == Track::kStall && span.label.cause != StallCause::kNorm &&
         span.label.cause != StallCause::kHostWork;
}

double synchronize_seconds(const StepTrace& trace) {
  double seconds = trace.seconds - trace.optimizer_begin_seconds;
  if (!trace.accesses.empty()) seconds += trace.accesses.front().begin_seconds;
  for (const TracedSpan& span : trace.spans) {
    if (span.begin_seconds < trace.optimizer_begin_seconds) continue;
    if (span.label.track == Track::kDeviceAdam || is_simulated_stall(span)) seconds -= seconds_of(span);
  }
  return std::max(seconds, 0.0);
}

// How far the calling thread ran ahead of the device at most.
double launch_ahead_seconds(const StepTrace& trace) {
  double ahead = 0;
  for (const TracedAccess& access : trace.accesses)
    ahead = std::max(ahead, access.begin_seconds - access.launched_seconds);
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
  measure_host_adam(trace, rates);
  rates.device_adam_params_per_second = device_adam_params_per_second(trace);
  rates.synchronize_seconds = synchronize_seconds(trace);
  rates.launch_ahead_seconds = launch_ahead_seconds(trace);
  return rates;
}

std::vector<double> measured_compute_seconds(const StepTrace& trace) {
  std::vector<double> begins;
  std::vector<double> seconds;
  for (const TracedAccess& access : trace.accesses) {
    begins.push_back(access.begin_seconds);
    seconds.push_back(access.seconds);
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
