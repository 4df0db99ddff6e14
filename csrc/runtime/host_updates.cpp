#include "runtime/host_updates.h"

#include <cstring>
#include <utility>

namespace patrickstar {

namespace {

// Around the work of an update, on the thread that does it; nothing when nobody wants to know.
class HostSpanScope {
 public:
  explicit HostSpanScope(HostSpan* span) : span_(span) {
    if (span_ != nullptr) span_->begin = TraceClock::now();
  }
  ~HostSpanScope() {
    if (span_ == nullptr) return;
    span_->end = TraceClock::now();
    span_->ran = true;
  }
  HostSpanScope(const HostSpanScope&) = delete;
  HostSpanScope& operator=(const HostSpanScope&) = delete;

 private:
  HostSpan* span_;
};

// A trace waits for the span of an update, also of one that failed.
class HostSpanEnd {
 public:
  explicit HostSpanEnd(HostSpan* span) : span_(span) {}
  ~HostSpanEnd() {
    if (span_ != nullptr) span_->done.complete();
  }
  HostSpanEnd(const HostSpanEnd&) = delete;
  HostSpanEnd& operator=(const HostSpanEnd&) = delete;

 private:
  HostSpan* span_;
};

}  // namespace

SpanLabel update_label(Track track, ChunkId first_chunk, const std::vector<optim::AdamJob>& jobs) {
  SpanLabel label{track, StallCause::kNone, {first_chunk, ArrayKind::kMaster}};
  for (const optim::AdamJob& job : jobs) label.numel += job.range.numel;
  return label;
}

Event HostUpdates::submit(HostUpdate update) {
  const std::shared_ptr<HostSpan> span =
      tracer_.open_host_span(update_label(Track::kHostAdam, update.chunk, update.jobs), update.cancelled);
  return queue_.submit([this, span, shared = std::make_shared<const HostUpdate>(std::move(update))] {
    const HostSpanEnd end(span.get());
    if (!shared->is_cancelled()) run(*shared, span.get());
  });
}

void HostUpdates::run(const HostUpdate& update, HostSpan* span) {
  for (const Event& event : update.after) backend_.synchronize(event);
  const HostSpanScope scope(span);
  for (const Restore& restore : update.restores) {
    compute_.cast_from_float(restore.in, restore.out, restore.dtype, restore.numel);
  }
  for (const Carry& carry : update.carries) {
    std::memcpy(carry.out, carry.in, static_cast<size_t>(carry.num_bytes));
  }
  compute_.adam(update.jobs);
}

}  // namespace patrickstar
