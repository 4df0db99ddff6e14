// Traces one step: the activity of every queue, the stalls of each access, and the owners of device memory.
//
//   tracer.arm();            // the next training step is wanted
//   tracer.begin_step();     // its first forward begins; parts of the runtime report from now on (common/tracing.h)
//   tracer.begin_optimizer();
//   tracer.end_step(timeline, StepOutcome::kApplied);
//   StepTrace trace = *tracer.take();
//
// A trace spans the first forward to the end of the optimizer's step, as the compute queue sees them. Work that the
// step started is recorded whole: updates and downloads that run into the next step have end_seconds > seconds. Updates
// of the previous step that still run begin at 0 and are marked kStepBefore. They are recorded only if the tracer was
// armed when they were submitted.
//
// begin_step() drains the compute queue once, to align the host's clock; nothing else waits until take(). Guarded by
// the runtime's lock.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "backend/backend.h"
#include "chunk/chunk_store.h"
#include "common/timeline.h"
#include "common/tracing.h"
#include "memory/device_buffer_pool.h"

namespace patrickstar {

enum class StepOutcome : uint8_t {
  kApplied,
  kSkipped,  // non-finite gradients
};

enum class SpanOwner : uint8_t { kThisStep, kStepBefore };

// Seconds since the beginning of the step.
struct TracedSpan {
  SpanLabel label;
  double begin_seconds = 0;
  double end_seconds = 0;
  SpanOwner owner = SpanOwner::kThisStep;
  bool dropped = false;  // a speculative update that was not used
};

// Device memory: buffers by array kind, idle buffers, and activations.
struct MemorySample {
  double seconds = 0;
  int64_t activation_bytes = 0;
  int64_t idle_bytes = 0;
  std::array<int64_t, kNumArrayKinds> chunk_buffer_bytes = {};

  int64_t device_buffer_bytes() const;
};

struct TracedAccess {
  Phase phase = Phase::kForward;
  std::vector<ArrayId> acquired;
  double launched_seconds = 0;  // when the calling thread got there, ahead of the device
  double begin_seconds = 0;
  double seconds = 0;                 // until the next access, or the optimizer's step
  double stalled_seconds = 0;         // part of `seconds`
  int64_t activation_peak_bytes = 0;  // as in the step's timeline
  // Memory at the peak of activations. If buffers follow activation memory (Backend::follows_activations): the peak,
  // and the fewest buffer bytes during the access. Otherwise a sampled instant.
  MemorySample memory;
};

struct StepTrace {
  StepOutcome outcome = StepOutcome::kApplied;
  double seconds = 0;
  double optimizer_begin_seconds = 0;
  int64_t device_limit_bytes = kUnlimited;
  std::vector<TracedAccess> accesses;  // as in the step's timeline
  std::vector<TracedSpan> spans;       // by begin, on each track
  std::vector<MemorySample> samples;   // taken when buffers change hands
};

class StepTracer final : public Tracer {
 public:
  StepTracer(Backend& backend, const ChunkStore& store, const DeviceBufferPool& device_buffers)
      : backend_(backend), store_(store), device_buffers_(device_buffers) {}

  // Forgets a trace that was not taken.
  void arm();
  // Ignored unless armed.
  void begin_step();
  void begin_optimizer();
  void end_step(const Timeline& timeline, StepOutcome outcome);
  // Gives up the traced step; the next one is traced instead.
  void abandon();
  // The traced step is over and not taken yet.
  bool is_complete() const { return stage_ == TraceState::kComplete; }
  // Returns the trace once; nothing before the step is over. Waits for the work that the step started.
  std::optional<StepTrace> take();
  // The traced step up to its optimizer's step, which begins now: accesses, transfers and stalls, without host updates.
  // Waits for the device. Nothing if no step is traced.
  std::optional<StepTrace> until_optimizer();

  std::shared_ptr<HostSpan> open_host_span(const SpanLabel& label,
                                           std::shared_ptr<const std::atomic<bool>> dropped) override;

 protected:
  void give_up() override;
  void do_begin_access(Phase phase, const std::vector<ArrayId>& acquired) override;
  void do_settle_access() override;
  void do_sample_memory() override;
  void begin_span(const SpanLabel& label) override;
  void end_span(Track track) override;

 private:
  enum class TraceState : uint8_t { kOff, kArmed, kTracing, kComplete };

  struct OpenSpan {
    SpanLabel label;
    Mark begin;
    Mark end;
    size_t access;  // number of accesses begun before it
  };
  struct OpenHostSpan {
    SpanLabel label;
    std::shared_ptr<HostSpan> span;
    std::shared_ptr<const std::atomic<bool>> dropped;
    SpanOwner owner;
  };
  struct OpenAccess {
    TracedAccess access;
    TraceClock::time_point launched = {};
    Mark begin;
    size_t begin_sample = 0;         // index of the first sample after its begin
    size_t arrays_there_sample = 0;  // index of the first sample after its arrays were there
  };
  struct OpenSample {
    MemorySample sample;
    Mark mark;
  };

  void clear();
  double seconds_at(const Mark& mark) { return backend_.seconds_between(origin_, mark); }
  double seconds_at(TraceClock::time_point time) const {
    return std::chrono::duration<double>(time - host_origin_).count();
  }
  void resolve_samples(StepTrace& trace);
  void resolve_spans(StepTrace& trace);
  void resolve_host_spans(StepTrace& trace);
  void resolve_accesses(StepTrace& trace);
  MemorySample memory_at_high_activation_memory(const std::vector<MemorySample>& samples,
                                                int64_t activation_peak_bytes) const;

  Backend& backend_;
  const ChunkStore& store_;
  const DeviceBufferPool& device_buffers_;
  TraceState stage_ = TraceState::kOff;
  Mark origin_;
  TraceClock::time_point host_origin_ = {};
  Mark optimizer_;
  size_t optimizer_sample_ = 0;  // index of the first sample of the optimizer's step
  Mark end_;
  StepOutcome outcome_ = StepOutcome::kApplied;
  std::vector<OpenSpan> spans_;
  std::array<size_t, kNumTracks> running_ = {};  // by track: index of the last span begun
  int open_stalls_ = 0;
  std::vector<OpenHostSpan> host_spans_;
  std::vector<OpenAccess> accesses_;
  std::vector<OpenSample> samples_;
};

}  // namespace patrickstar
