#include <map>

#include "bind/bind.h"
#include "trace/step_tracer.h"

namespace nb = nanobind;

namespace patrickstar::bind {

namespace {

nb::dict describe_memory(const MemorySample& sample) {
  nb::dict chunk_buffers;
  for (int kind = 0; kind < kNumArrayKinds; ++kind)
    chunk_buffers[nb::cast(static_cast<ArrayKind>(kind))] = sample.chunk_buffer_bytes[static_cast<size_t>(kind)];
  nb::dict fields;
  fields["activation_bytes"] = sample.activation_bytes;
  fields["idle_bytes"] = sample.idle_bytes;
  fields["chunk_buffer_bytes"] = chunk_buffers;
  return fields;
}

nb::dict describe_access(const TracedAccess& access) {
  nb::list acquired;
  for (ArrayId id : access.acquired) acquired.append(nb::make_tuple(id.chunk, id.kind));
  nb::dict fields = describe_memory(access.memory);
  fields["phase"] = access.phase;
  fields["activation_peak_bytes"] = access.activation_peak_bytes;
  fields["acquired"] = acquired;
  fields["launched_seconds"] = access.launched_seconds;
  fields["begin_seconds"] = access.begin_seconds;
  fields["seconds"] = access.seconds;
  fields["stalled_seconds"] = access.stalled_seconds;
  fields["compute_seconds"] = access.seconds - access.stalled_seconds;
  return fields;
}

nb::dict describe_span(const TracedSpan& span) {
  nb::dict fields;
  fields["track"] = span.label.track;
  fields["cause"] = span.label.cause;
  fields["chunk"] = span.label.array.chunk;
  fields["kind"] = span.label.array.kind;
  fields["num_bytes"] = span.label.num_bytes;
  fields["numel"] = span.label.numel;
  fields["begin_seconds"] = span.begin_seconds;
  fields["seconds"] = span.end_seconds - span.begin_seconds;
  fields["owner"] = span.owner;
  fields["dropped"] = span.dropped;
  return fields;
}

}  // namespace

nb::dict describe_trace(const StepTrace& trace) {
  nb::list accesses;
  for (const TracedAccess& access : trace.accesses) accesses.append(describe_access(access));
  nb::list spans;
  for (const TracedSpan& span : trace.spans) spans.append(describe_span(span));
  nb::list samples;
  for (const MemorySample& sample : trace.samples) {
    nb::dict fields = describe_memory(sample);
    fields["seconds"] = sample.seconds;
    samples.append(fields);
  }
  nb::dict result;
  result["outcome"] = trace.outcome;
  result["seconds"] = trace.seconds;
  result["optimizer_begin_seconds"] = trace.optimizer_begin_seconds;
  result["device_limit_bytes"] = trace.device_limit_bytes;
  result["accesses"] = accesses;
  result["spans"] = spans;
  result["samples"] = samples;
  return result;
}

nb::dict describe_stalls(const StepTrace& trace) {
  std::map<StallCause, double> stalled;
  for (const TracedSpan& span : trace.spans) {
    if (span.label.track == Track::kStall && span.owner == SpanOwner::kThisStep)
      stalled[span.label.cause] += span.end_seconds - span.begin_seconds;
  }
  nb::dict result;
  result["seconds"] = trace.seconds;
  result["stalled_seconds"] = stalled;
  return result;
}

void register_trace(nb::module_& module) {
  nb::enum_<Track>(module, "Track", "Track of a span in a trace (common/tracing.h).")
      .value("STALL", Track::kStall)
      .value("UPLOAD", Track::kUpload)
      .value("DOWNLOAD", Track::kDownload)
      .value("GATHER", Track::kGather)
      .value("SCATTER", Track::kScatter)
      .value("HOST_ADAM", Track::kHostAdam)
      .value("HOST_STATES", Track::kHostStates)
      .value("HOST_OPEN", Track::kHostOpen)
      .value("DEVICE_ADAM", Track::kDeviceAdam)
      .value("DISK_READ", Track::kDiskRead)
      .value("DISK_ADAM", Track::kDiskAdam)
      .value("DISK_WRITE", Track::kDiskWrite)
      .value("ROUND_TRIP", Track::kRoundTrip);
  nb::enum_<StallCause>(module, "StallCause", "Cause of a stall of the compute queue (common/tracing.h).")
      .value("NONE", StallCause::kNone)
      .value("UPLOAD", StallCause::kUpload)
      .value("DOWNLOAD", StallCause::kDownload)
      .value("HOST_UPDATE", StallCause::kHostUpdate)
      .value("HOST_WORK", StallCause::kHostWork)
      .value("ROOM", StallCause::kRoom)
      .value("NORM", StallCause::kNorm)
      .value("COLLECTIVE", StallCause::kCollective);
  nb::enum_<SpanOwner>(module, "SpanOwner", "The step that a span belongs to (trace/step_tracer.h).")
      .value("THIS_STEP", SpanOwner::kThisStep)
      .value("STEP_BEFORE", SpanOwner::kStepBefore);
  nb::enum_<StepOutcome>(module, "StepOutcome", "How a step ended (trace/step_tracer.h).")
      .value("APPLIED", StepOutcome::kApplied)
      .value("SKIPPED", StepOutcome::kSkipped);
}

}  // namespace patrickstar::bind
