// Shares one tracer between several readers. Each asks for a step and takes its trace; several may get the same one.
//
//   requests.ask(TraceReader::kPlanner);   // then a step goes by
//   std::optional<StepTrace> trace = requests.take(TraceReader::kPlanner);
//
// The user always gets the first step that begins after asking. If another reader's step is under way, it is given up,
// and that reader gets the user's. Guarded by the runtime's lock.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "trace/step_tracer.h"

namespace patrickstar {

enum class TraceReader : uint8_t {
  kUser,     // one step, for its files
  kPlanner,  // step times
  kMonitor,  // occasional stalls
  kChoice,   // choice of recomputation, before the optimizer's first step
};

constexpr size_t kNumTraceReaders = 4;

class TraceRequests {
 public:
  explicit TraceRequests(StepTracer& tracer) : tracer_(tracer) {}

  // Traces the next training step for `reader`, and drops the reader's previous trace. Waits for the work of a traced
  // step that another reader has not taken.
  void ask(TraceReader reader);
  bool is_ready(TraceReader reader) const;
  // Returns the trace once; nothing before the step is over. Waits for the work that the step started.
  std::optional<StepTrace> take(TraceReader reader);
  // The running step for a reader who asked; see StepTracer. Ends the request.
  std::optional<StepTrace> take_until_optimizer(TraceReader reader);

 private:
  struct Request {
    bool open = false;               // asked, and still in the tracer
    std::optional<StepTrace> trace;  // out of the tracer, not taken yet
  };

  Request& request(TraceReader reader) { return requests_[static_cast<size_t>(reader)]; }
  const Request& request(TraceReader reader) const { return requests_[static_cast<size_t>(reader)]; }
  // Hands the complete step to all readers that asked.
  void collect();

  StepTracer& tracer_;
  std::array<Request, kNumTraceReaders> requests_;
};

}  // namespace patrickstar
