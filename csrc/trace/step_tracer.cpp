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
    case Track::kVisit:
      return Queue::kVisitUpdate;
    default:
      return Queue::kCompute;
  }
}

}  // namespace

int64_t MemorySample::slot_bytes() const {
  int64_t total = idle_bytes;
  for (int64_t bytes : payload_bytes) total += bytes;
  return total;
}

void StepTracer::clear() {
  on_ = false;
  origin_ = optimizer_ = end_ = nullptr;
  open_stalls_ = 0;
  spans_.clear();
  host_spans_.clear();
  moments_.clear();
  samples_.clear();
}

void StepTracer::arm() {
  if (stage_ == Stage::kTracing) return;
  if (stage_ != Stage::kArmed) clear();
  stage_ = Stage::kArmed;
}

void StepTracer::begin_step() {
  if (stage_ != Stage::kArmed) return;
  stage_ = Stage::kTracing;
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
  stage_ = Stage::kComplete;
  if (optimizer_ == nullptr) optimizer_sample_ = samples_.size();
  outcome_ = outcome;
  const size_t known = std::min(moments_.size(), timeline.moments.size());
  for (size_t t = 0; t < known; ++t) moments_[t].moment.tide_peak_bytes = timeline.moments[t].tide_peak_bytes;
}

void StepTracer::abandon() {
  if (stage_ == Stage::kTracing) give_up();
}

void StepTracer::give_up() {
  clear();
  stage_ = Stage::kArmed;
}

std::shared_ptr<HostSpan> StepTracer::open_host_span(const SpanLabel& label,
                                                     std::shared_ptr<const std::atomic<bool>> dropped) {
  if (stage_ != Stage::kArmed && stage_ != Stage::kTracing) return nullptr;
  std::shared_ptr<HostSpan> span;
  observe([&] {
    auto made = std::make_shared<HostSpan>();
    host_spans_.push_back({label, made, std::move(dropped), on_ ? SpanOwner::kThisStep : SpanOwner::kStepBefore});
    span = std::move(made);
  });
  return span;
}

void StepTracer::do_begin_moment(Phase phase, const std::vector<ArrayId>& acquired) {
  OpenMoment moment;
  moment.moment.phase = phase;
  moment.moment.acquired = acquired;
  moment.launched = TraceClock::now();
  moment.begin = backend_.mark(Queue::kCompute);
  moment.begin_sample = moment.settled_sample = samples_.size();
  moments_.push_back(std::move(moment));
}

void StepTracer::do_settle_moment() {
  moments_.back().settled_sample = samples_.size();
  do_sample_memory();
}

void StepTracer::do_sample_memory() {
  MemorySample sample;
  for (int index = 0; index < store_.num_arrays(); ++index) {
    const ArrayId id = ArrayId::from_index(index);
    sample.payload_bytes[static_cast<size_t>(id.kind)] += store_.array(id).slot.num_bytes;
  }
  sample.idle_bytes = slots_.idle_bytes();
  sample.tide_bytes = backend_.tide_bytes();
  samples_.push_back({sample, backend_.mark(Queue::kCompute)});
}

void StepTracer::begin_span(const SpanLabel& label) {
  if (label.track == Track::kStall && open_stalls_++ > 0) return;
  running_[static_cast<size_t>(label.track)] = spans_.size();
  spans_.push_back({label, nullptr, nullptr, moments_.size()});
  spans_.back().begin = backend_.mark(queue_of(label.track));  // after the vector grew
}

void StepTracer::end_span(Track track) {
  if (!on_) return;
  if (track == Track::kStall && --open_stalls_ > 0) return;
  spans_[running_[static_cast<size_t>(track)]].end = backend_.mark(queue_of(track));
}

std::optional<StepTrace> StepTracer::take() {
  if (stage_ != Stage::kComplete) return std::nullopt;
  StepTrace trace;
  trace.outcome = outcome_;
  trace.seconds = seconds_at(end_);
  trace.optimizer_begin_seconds = optimizer_ == nullptr ? trace.seconds : seconds_at(optimizer_);
  trace.device_limit_bytes = backend_.limit_bytes();
  for (OpenSample& open : samples_) {
    open.sample.seconds = seconds_at(open.mark);
    trace.samples.push_back(open.sample);
  }
  resolve_moments(trace);
  resolve_spans(trace);
  resolve_host_spans(trace);
  clear();
  stage_ = Stage::kOff;
  return trace;
}

void StepTracer::resolve_moments(StepTrace& trace) {
  for (size_t t = 0; t < moments_.size(); ++t) {
    const OpenMoment& open = moments_[t];
    const bool last = t + 1 == moments_.size();
    TracedMoment moment = open.moment;
    moment.launched_seconds = seconds_at(open.launched);
    moment.begin_seconds = seconds_at(open.begin);
    const double end = last ? trace.optimizer_begin_seconds : seconds_at(moments_[t + 1].begin);
    moment.seconds = end - moment.begin_seconds;
    size_t end_sample = last ? optimizer_sample_ : moments_[t + 1].begin_sample;
    moment.memory = memory_at_high_tide(
        {trace.samples.begin() + static_cast<std::ptrdiff_t>(open.settled_sample),
         trace.samples.begin() + static_cast<std::ptrdiff_t>(std::max(end_sample, open.settled_sample))},
        moment.tide_peak_bytes);
    trace.moments.push_back(std::move(moment));
  }
}

MemorySample StepTracer::memory_at_high_tide(const std::vector<MemorySample>& samples, int64_t tide_peak_bytes) const {
  if (samples.empty()) return {};  // an exception ended the access before its arrays were there
  if (!backend_.follows_tide()) {
    return *std::max_element(samples.begin(), samples.end(),
                             [](const MemorySample& a, const MemorySample& b) { return a.tide_bytes < b.tide_bytes; });
  }
  MemorySample least =
      *std::min_element(samples.begin(), samples.end(), [](const MemorySample& a, const MemorySample& b) {
        return std::make_pair(a.slot_bytes(), a.idle_bytes) < std::make_pair(b.slot_bytes(), b.idle_bytes);
      });
  least.tide_bytes = tide_peak_bytes;
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
      const bool in_moment = open.moment > 0 && span.begin_seconds < trace.optimizer_begin_seconds;
      if (in_moment) trace.moments[open.moment - 1].stalled_seconds += seconds;
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
