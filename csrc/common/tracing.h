// The tracing interface of the runtime's parts.
//
//   mark    a point in a queue's work that records the time at which the queue reached it (backend/backend.h)
//   span    an interval of one queue's or worker's work
//   track   the row of the picture that a span belongs to; spans of one track do not overlap
//   stall   an interval in which the compute queue waited, by cause. Marks on that queue measure it, also when the
//           calling thread waits: nothing stalls while earlier work is still running.
//
// Tracing is on during the step that the user requested (trace/step_tracer.h). Otherwise every call costs one load and
// a branch, and no clock is read. Guarded by the runtime's lock, except HostSpan.
//
//   const TraceScope stall(tracer, {Track::kStall, StallCause::kUpload, id});
//   backend.wait(Queue::kCompute, array.device_ready);
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <new>
#include <vector>

#include "common/event.h"
#include "common/timeline.h"
#include "common/types.h"

namespace patrickstar {

// Backends derive their own state, as for events.
struct MarkState {
  virtual ~MarkState() = default;
};
using Mark = std::shared_ptr<MarkState>;

// The host's clock. A backend maps it to the time axis of its marks.
using TraceClock = std::chrono::steady_clock;

enum class Track : uint8_t {
  kStall,       // the compute queue, waiting
  kUpload,      // the upload queue
  kDownload,    // the download queue
  kGather,      // collectives of parameters
  kScatter,     // collectives of gradients
  kHostAdam,    // the worker of host updates
  kHostStates,  // the same worker: phase two of a two-phase update
  kHostOpen,    // the same worker: scale-dependent parameters
  kDeviceAdam,  // updates on the compute queue
  kDiskRead,    // the worker that reads states from the disk
  kDiskAdam,    // the worker that updates states from the disk
  kDiskWrite,   // the worker that writes states to the disk
  kRoundTrip,   // GPU round-trip updates
};

constexpr int kNumTracks = 13;

enum class StallCause : uint8_t {
  kNone,        // not a stall
  kUpload,      // an upload
  kDownload,    // a gradient's download
  kHostUpdate,  // an optimizer update on the host
  kHostWork,    // the calling thread derives, sums or zeroes an array in host memory
  kRoom,        // device memory: an eviction, or the last use of a device buffer
  kNorm,        // the calling thread reads the gradients' norm
  kCollective,  // an all-gather or reduce-scatter
};

struct SpanLabel {
  Track track = Track::kStall;
  StallCause cause = StallCause::kNone;
  ArrayId array = {};     // for an update: the master of its first chunk
  int64_t num_bytes = 0;  // of a transfer; of a collective: bytes received from other ranks
  int64_t numel = 0;      // of an update: parameters
};

// Begin and end of a task on a worker thread. The worker writes it; other threads read it once `done` is complete.
struct HostSpan {
  TraceClock::time_point begin = {};
  TraceClock::time_point end = {};
  bool ran = false;  // false: cancelled before it began
  HostEvent done;
};

// Times a task on its thread. Does nothing if `span` is null.
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

// Completes the span of a task, also if the task fails. A trace waits for it.
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

// Completes the span if submitting the task fails.
class UnsubmittedSpan {
 public:
  explicit UnsubmittedSpan(HostSpan* span) : span_(span) {}
  ~UnsubmittedSpan() {
    if (span_ != nullptr) span_->done.complete();
  }
  UnsubmittedSpan(const UnsubmittedSpan&) = delete;
  UnsubmittedSpan& operator=(const UnsubmittedSpan&) = delete;

  // The task's own HostSpanEnd completes the span from here on.
  void submitted() { span_ = nullptr; }

 private:
  HostSpan* span_;
};

class Tracer {
 public:
  virtual ~Tracer() = default;

  bool is_on() const { return on_; }

  // Begins an access; later stalls belong to it.
  void begin_access(Phase phase, const std::vector<ArrayId>& acquired) {
    if (on_) observe([&] { do_begin_access(phase, acquired); });
  }
  // The access has its arrays; memory samples count for it from here on.
  void settle_access() {
    if (on_) observe([&] { do_settle_access(); });
  }
  // Records the device memory after a change.
  void sample_memory() {
    if (on_) observe([&] { do_sample_memory(); });
  }
  // Null if tracing is off. `dropped` may be null; if it is true at the end, the result was not used.
  virtual std::shared_ptr<HostSpan> open_host_span(const SpanLabel& label,
                                                   std::shared_ptr<const std::atomic<bool>> dropped) = 0;

 protected:
  friend class TraceScope;
  // Runs `function`. If memory for the trace is missing, the traced work goes on without one.
  template <typename Function>
  void observe(const Function& function) {
    try {
      function();
    } catch (const std::bad_alloc&) {
      give_up();
    }
  }
  // Drops the trace of the running step.
  virtual void give_up() = 0;
  virtual void do_begin_access(Phase phase, const std::vector<ArrayId>& acquired) = 0;
  virtual void do_settle_access() = 0;
  virtual void do_sample_memory() = 0;
  virtual void begin_span(const SpanLabel& label) = 0;
  virtual void end_span(Track track) = 0;

  bool on_ = false;
};

// A span from construction to destruction. Of nested stalls only the outermost counts.
class TraceScope {
 public:
  TraceScope(Tracer& tracer, const SpanLabel& label)
      : tracer_(tracer.is_on() ? &tracer : nullptr), track_(label.track) {
    if (tracer_ != nullptr) tracer_->observe([&] { tracer_->begin_span(label); });
  }
  ~TraceScope() {
    if (tracer_ == nullptr) return;
    try {
      tracer_->end_span(track_);
    } catch (const std::exception&) {  // the device has failed and the user will see it; the span stays open
    }
  }
  TraceScope(const TraceScope&) = delete;
  TraceScope& operator=(const TraceScope&) = delete;

 private:
  Tracer* tracer_;
  Track track_;
};

}  // namespace patrickstar
