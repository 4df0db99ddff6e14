#include "trace/trace_requests.h"

#include <algorithm>
#include <utility>

namespace patrickstar {

void TraceRequests::ask(TraceReader reader) {
  Request& mine = request(reader);
  mine.trace.reset();
  if (tracer_.is_complete()) {
    mine.open = false;
    const bool wanted =
        std::any_of(requests_.begin(), requests_.end(), [](const Request& other) { return other.open; });
    if (wanted) collect();
  } else if (tracer_.is_on() && reader == TraceReader::kUser && !mine.open) {
    tracer_.abandon();
  }
  mine.open = true;
  tracer_.arm();
}

bool TraceRequests::is_ready(TraceReader reader) const {
  return request(reader).trace.has_value() || (request(reader).open && tracer_.is_complete());
}

std::optional<StepTrace> TraceRequests::take(TraceReader reader) {
  if (request(reader).open && tracer_.is_complete()) collect();
  return std::exchange(request(reader).trace, std::nullopt);
}

std::optional<StepTrace> TraceRequests::take_until_optimizer(TraceReader reader) {
  return std::exchange(request(reader).open, false) ? tracer_.until_optimizer() : std::nullopt;
}

void TraceRequests::collect() {
  const std::optional<StepTrace> trace = tracer_.take();
  for (Request& request : requests_) {
    if (std::exchange(request.open, false)) request.trace = trace;
  }
}

}  // namespace patrickstar
