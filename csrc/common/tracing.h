// The vocabulary of a traced step, and the interface by which the runtime's parts say what they do.
//
//   mark    a point in the work of a queue that remembers when the queue got there (backend/backend.h)
//   span    what one queue or worker did from one point in time to another
//   track   where: the row of the picture that the span belongs to. Spans of one track follow each other.
//   stall   a span of the compute queue in which it had to wait, by cause. It is measured by marks on that queue, also
//           where the calling thread waits: while work enqueued before is still running nothing stalls.
//
// A tracer is on during the step that somebody asked for (trace/step_tracer.h). Else every call here costs one load and
// a branch, and nothing reads a clock. Guarded by the runtime's lock but for HostSpan.
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

// The host's clock; a backend places it on the axis of its marks.
using TraceClock = std::chrono::steady_clock;

enum class Track : uint8_t {
  kStall,       // the compute queue, waiting
  kUpload,      // the upload queue
  kDownload,    // the download queue
  kGather,      // the queue of values' collectives
  kScatter,     // the queue of gradients' collectives
  kHostAdam,    // the worker of the host's updates
  kHostStates,  // the same worker, updating states whose parameters it has computed before
  kHostOpen,    // the same worker, computing parameters that it left open before
  kDeviceAdam,  // the compute queue, updating
  kDiskRead,    // the worker that reads states from the disk
  kDiskAdam,    // the worker of the updates of chunks whose states are on the disk
  kDiskWrite,   // the worker that writes states to the disk
  kVisit,       // the queue on which the device makes updates for the host
};

constexpr int kNumTracks = 13;

// What the compute queue waited for.
enum class StallCause : uint8_t {
  kNone,        // not a stall
  kUpload,      // an array on its way to the device
  kDownload,    // a gradient on its way to the host
  kHostUpdate,  // an optimizer update on the host
  kHostWork,    // the calling thread, which derives, sums or zeroes an array in host memory
  kRoom,        // room on the device: what leaves it, or the last use of a slot
  kNorm,        // the calling thread, which learns the gradients' norm
  kCollective,  // a chunk being gathered from all ranks, or gradients being scattered
};

struct SpanLabel {
  Track track = Track::kStall;
  StallCause cause = StallCause::kNone;
  ArrayId array = {};     // for an update: the master of its first chunk
  int64_t num_bytes = 0;  // of a transfer; of a collective: what comes from the other ranks
  int64_t numel = 0;      // of an update: parameters
};

// When a worker thread did a task. The worker writes it; others read once `done` is complete.
struct HostSpan {
  TraceClock::time_point begin = {};
  TraceClock::time_point end = {};
  bool ran = false;  // false: it was cancelled before it began
  HostEvent done;
};

// Around the work of a task, on the thread that does it; nothing when nobody wants to know.
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

// A trace waits for the span of a task, also of one that failed.
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

// Around handing a task over: where that fails no task ends its span.
class UnsubmittedSpan {
 public:
  explicit UnsubmittedSpan(HostSpan* span) : span_(span) {}
  ~UnsubmittedSpan() {
    if (span_ != nullptr) span_->done.complete();
  }
  UnsubmittedSpan(const UnsubmittedSpan&) = delete;
  UnsubmittedSpan& operator=(const UnsubmittedSpan&) = delete;

  // The task's own HostSpanEnd ends it.
  void submitted() { span_ = nullptr; }

 private:
  HostSpan* span_;
};

class Tracer {
 public:
  virtual ~Tracer() = default;

  bool is_on() const { return on_; }

  // A moment begins: what it waits for from here on is its own.
  void begin_moment(Phase phase, const std::vector<ArrayId>& acquired) {
    if (on_) observe([&] { do_begin_moment(phase, acquired); });
  }
  // Its arrays are there; memory counts as the moment's from here on.
  void settle_moment() {
    if (on_) observe([&] { do_settle_moment(); });
  }
  // Device memory changed hands.
  void sample_memory() {
    if (on_) observe([&] { do_sample_memory(); });
  }
  // Null when nobody wants to know. `dropped` may be null; true by the end means that the result was not used.
  virtual std::shared_ptr<HostSpan> open_host_span(const SpanLabel& label,
                                                   std::shared_ptr<const std::atomic<bool>> dropped) = 0;

 protected:
  friend class TraceScope;
  // Runs `function`; where there is no memory for a trace, the traced work goes on without one.
  template <typename Function>
  void observe(const Function& function) {
    try {
      function();
    } catch (const std::bad_alloc&) {
      give_up();
    }
  }
  // The trace of the running step.
  virtual void give_up() = 0;
  virtual void do_begin_moment(Phase phase, const std::vector<ArrayId>& acquired) = 0;
  virtual void do_settle_moment() = 0;
  virtual void do_sample_memory() = 0;
  virtual void begin_span(const SpanLabel& label) = 0;
  virtual void end_span(Track track) = 0;

  bool on_ = false;
};

// A span from here to the end of the block. Of nested stalls the outermost counts.
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
    } catch (const std::exception&) {  // the device has failed, which is on its way to the user; the span has no end
    }
  }
  TraceScope(const TraceScope&) = delete;
  TraceScope& operator=(const TraceScope&) = delete;

 private:
  Tracer* tracer_;
  Track track_;
};

}  // namespace patrickstar
