#include "trace/step_tracer.h"

#include <algorithm>
#include <cstddef>
#include <utility>

namespace patrickstar {

namespace {

// Consecutive marks are microseconds apart on a GPU; shorter spans are no stalls.
constexpr double kLeastStallSeconds = 1e-5;

Queue queue_of(Track track) {
  switch (track) {
    case Track::kUpload:
      return Queue::kUpload;
    case Track::kDownload:
      return Queue::kDownload;
    case Track::kGather:
      return Queue::kGather;
    case Track::kScatter:
      return Queue::kScatter;
    case Track::kRoundTrip:
      return Queue::kRoundTripUpdate;
    default:
      return Queue::kCompute;
  }
}

}  // namespace

int64_t MemorySample::device_buffer_bytes() const {
  int64_t total = idle_bytes;
  for (int64_t bytes : chunk_buffer_bytes) total += bytes;
  return total;
}

void StepTracer::clear() {
  on_ = false;
  origin_ = optimizer_ = end_ = nullptr;
  open_stalls_ = 0;
  spans_.clear();
  host_spans_.clear();
  accesses_.clear();
  samples_.clear();
}

void StepTracer::arm() {
  if (stage_ == TraceState::kTracing) return;
  if (stage_ != TraceState::kArmed) clear();
  stage_ = TraceState::kArmed;
}

void StepTracer::begin_step() {
  if (stage_ != TraceState::kArmed) return;
  stage_ = TraceState::kTracing;
  origin_ = backend_.mark(Queue::kCompute);
  backend_.seconds_between(origin_, origin_);  // drains the queue
  host_origin_ = TraceClock::now();
  on_ = true;
}

void StepTracer::begin_optimizer() {
  if (!on_) return;
  optimizer_ = backend_.mark(Queue::kCompute);
  optimizer_sample_ = samples_.size();
}

void StepTracer::end_step(const Timeline& timeline, StepOutcome outcome) {
  if (!on_) return;
  end_ = backend_.mark(Queue::kCompute);
  on_ = false;
  stage_ = TraceState::kComplete;
  if (optimizer_ == nullptr) optimizer_sample_ = samples_.size();
  outcome_ = outcome;
  const size_t known = std::min(accesses_.size(), timeline.accesses.size());
  for (size_t t = 0; t < known; ++t)
    accesses_[t].access.activation_peak_bytes = timeline.accesses[t].activation_peak_bytes;
}

void StepTracer::abandon() {
  if (stage_ == TraceState::kTracing) give_up();
}

void StepTracer::give_up() {
  clear();
  stage_ = TraceState::kArmed;
}

std::shared_ptr<HostSpan> StepTracer::open_host_span(const SpanLabel& label,
                                                     std::shared_ptr<const std::atomic<bool>> dropped) {
  if (stage_ != TraceState::kArmed && stage_ != TraceState::kTracing) return nullptr;
  std::shared_ptr<HostSpan> span;
  observe([&] {
    auto made = std::make_shared<HostSpan>();
    host_spans_.push_back({label, made, std::move(dropped), on_ ? SpanOwner::kThisStep : SpanOwner::kStepBefore});
    span = std::move(made);
  });
  return span;
}

void StepTracer::do_begin_access(Phase phase, const std::vector<ArrayId>& acquired) {
  OpenAccess access;
  access.access.phase = phase;
  access.access.acquired = acquired;
  access.launched = TraceClock::now();
  access.begin = backend_.mark(Queue::kCompute);
  access.begin_sample = access.arrays_there_sample = samples_.size();
  accesses_.push_back(std::move(access));
}

void StepTracer::do_settle_access() {
  accesses_.back().arrays_there_sample = samples_.size();
  do_sample_memory();
}

void StepTracer::do_sample_memory() {
  MemorySample sample;
  for (int index = 0; index < store_.num_arrays(); ++index) {
    const ArrayId id = ArrayId::from_index(index);
    sample.chunk_buffer_bytes[static_cast<size_t>(id.kind)] += store_.array(id).device_buffer.num_bytes;
  }
  sample.idle_bytes = device_buffers_.idle_bytes();
  sample.activation_bytes = backend_.activation_bytes();
  samples_.push_back({sample, backend_.mark(Queue::kCompute)});
}

void StepTracer::begin_span(const SpanLabel& label) {
  if (label.track == Track::kStall && open_stalls_++ > 0) return;
  running_[static_cast<size_t>(label.track)] = spans_.size();
  spans_.push_back({label, nullptr, nullptr, accesses_.size()});
  spans_.back().begin = backend_.mark(queue_of(label.track));  // after the vector grew
}

void StepTracer::end_span(Track track) {
  if (!on_) return;
  if (track == Track::kStall && --open_stalls_ > 0) return;
  spans_[running_[static_cast<size_t>(track)]].end = backend_.mark(queue_of(track));
}

std::optional<StepTrace> StepTracer::take() {
  if (stage_ != TraceState::kComplete) return std::nullopt;
  StepTrace trace;
  trace.outcome = outcome_;
  trace.seconds = seconds_at(end_);
  trace.optimizer_begin_seconds = optimizer_ == nullptr ? trace.seconds : seconds_at(optimizer_);
  trace.device_limit_bytes = backend_.limit_bytes();
  resolve_samples(trace);
  resolve_accesses(trace);
  resolve_spans(trace);
  resolve_host_spans(trace);
  clear();
  stage_ = TraceState::kOff;
  return trace;
}

std::optional<StepTrace> StepTracer::until_optimizer() {
  if (stage_ != TraceState::kTracing) return std::nullopt;
  if (optimizer_ == nullptr) begin_optimizer();
  StepTrace trace;
  trace.seconds = trace.optimizer_begin_seconds = seconds_at(optimizer_);
  trace.device_limit_bytes = backend_.limit_bytes();
  resolve_samples(trace);
  resolve_accesses(trace);
  resolve_spans(trace);
  return trace;
}

void StepTracer::resolve_samples(StepTrace& trace) {
  for (OpenSample& open : samples_) {
    open.sample.seconds = seconds_at(open.mark);
    trace.samples.push_back(open.sample);
  }
}

void StepTracer::resolve_accesses(StepTrace& trace) {
  for (size_t t = 0; t < accesses_.size(); ++t) {
    const OpenAccess& open = accesses_[t];
    const bool last = t + 1 == accesses_.size();
    TracedAccess access = open.access;
    access.launched_seconds = seconds_at(open.launched);
    access.begin_seconds = seconds_at(open.begin);
    const double end = last ? trace.optimizer_begin_seconds : seconds_at(accesses_[t + 1].begin);
    access.seconds = end - access.begin_seconds;
    size_t end_sample = last ? optimizer_sample_ : accesses_[t + 1].begin_sample;
    access.memory = memory_at_high_activation_memory(
        {trace.samples.begin() + static_cast<std::ptrdiff_t>(open.arrays_there_sample),
         trace.samples.begin() + static_cast<std::ptrdiff_t>(std::max(end_sample, open.arrays_there_sample))},
        access.activation_peak_bytes);
    trace.accesses.push_back(std::move(access));
  }
}

MemorySample StepTracer::memory_at_high_activation_memory(const std::vector<MemorySample>& samples,
                                                          int64_t activation_peak_bytes) const {
  if (samples.empty()) return {};  // an exception ended the access before its arrays were there
  if (!backend_.follows_activations()) {
    return *std::max_element(samples.begin(), samples.end(), [](const MemorySample& a, const MemorySample& b) {
      return a.activation_bytes < b.activation_bytes;
    });
  }
  MemorySample least =
      *std::min_element(samples.begin(), samples.end(), [](const MemorySample& a, const MemorySample& b) {
        return std::make_pair(a.device_buffer_bytes(), a.idle_bytes) <
               std::make_pair(b.device_buffer_bytes(), b.idle_bytes);
      });
  least.activation_bytes = activation_peak_bytes;
  return least;
}

void StepTracer::resolve_spans(StepTrace& trace) {
  for (const OpenSpan& open : spans_) {
    if (open.end == nullptr) continue;  // an exception ended it
    TracedSpan span;
    span.label = open.label;
    span.begin_seconds = seconds_at(open.begin);
    span.end_seconds = seconds_at(open.end);
    const double seconds = span.end_seconds - span.begin_seconds;
    if (open.label.track == Track::kStall) {
      if (seconds < kLeastStallSeconds) continue;
      const bool in_access = open.access > 0 && span.begin_seconds < trace.optimizer_begin_seconds;
      if (in_access) trace.accesses[open.access - 1].stalled_seconds += seconds;
    }
    trace.spans.push_back(span);
  }
}

void StepTracer::resolve_host_spans(StepTrace& trace) {
  const auto first = static_cast<std::ptrdiff_t>(trace.spans.size());
  for (const OpenHostSpan& open : host_spans_) {
    open.span->done.settle();
    if (!open.span->ran) continue;
    TracedSpan span;
    span.label = open.label;
    span.owner = open.owner;
    span.begin_seconds = std::max(seconds_at(open.span->begin), 0.0);
    span.end_seconds = seconds_at(open.span->end);
    span.dropped = open.dropped != nullptr && *open.dropped;
    if (span.end_seconds > 0) trace.spans.push_back(span);
  }
  // Host tasks do not run in submission order (common/work_queue.h).
  std::stable_sort(trace.spans.begin() + first, trace.spans.end(),
                   [](const TracedSpan& a, const TracedSpan& b) { return a.begin_seconds < b.begin_seconds; });
}

}  // namespace patrickstar
