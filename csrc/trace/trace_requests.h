// Whom a traced step is for. Several readers share the one tracer: each asks for a step and takes its trace, and all
// may have the same one.
//
//   requests.ask(TraceReader::kPlanner);   // then a step goes by
//   std::optional<StepTrace> trace = requests.take(TraceReader::kPlanner);
//
// The user gets the next step that begins after asking, as if there were nobody else: where another's step is under way
// then, that one is given up, and the other gets the user's. Guarded by the runtime's lock.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "trace/step_tracer.h"

namespace patrickstar {

enum class TraceReader : uint8_t {
  kUser,     // wants one step, for its files
  kPlanner,  // learns how long a step takes
  kMonitor,  // says now and then what steps wait for
};

constexpr size_t kNumTraceReaders = 3;

class TraceRequests {
 public:
  explicit TraceRequests(StepTracer& tracer) : tracer_(tracer) {}

  // The next training step that begins is traced for `reader`, who gives up a trace that it has not taken. Waits for
  // what a traced step started, if another reader has not taken that yet.
  void ask(TraceReader reader);
  // The step that was asked for is over.
  bool is_ready(TraceReader reader) const;
  // Its trace, once; nothing before it is over. Waits for what the step started.
  std::optional<StepTrace> take(TraceReader reader);

 private:
  struct Request {
    bool open = false;               // asked for, and still in the tracer
    std::optional<StepTrace> trace;  // out of the tracer, not taken yet
  };

  Request& request(TraceReader reader) { return requests_[static_cast<size_t>(reader)]; }
  const Request& request(TraceReader reader) const { return requests_[static_cast<size_t>(reader)]; }
  // Hands the tracer's complete step to those who asked for it.
  void collect();

  StepTracer& tracer_;
  std::array<Request, kNumTraceReaders> requests_;
};

}  // namespace patrickstar
