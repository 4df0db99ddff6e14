#include <map>

#include "bind/bind.h"
#include "common/check.h"
#include "common/sizes.h"
#include "engine/collectives.h"
#include "plan/plan_vote.h"
#include "plan/timeline_merge.h"

namespace nb = nanobind;

namespace patrickstar::bind {

namespace {

nb::bytes in_python(const std::string& bytes) { return nb::bytes(bytes.data(), bytes.size()); }

std::map<std::string, nb::bytes> example_messages(int num_chunks) {
  const std::vector<Recipe> updates(static_cast<size_t>(num_chunks), Recipe::kHostAhead);
  const StepTimes times{Rates{}, {{0.5, 0.25, 0.0}, {}, {}}};
  return {{"request", in_python(packed(ChunkRequest{0, {num_chunks - 1}}))},
          {"summary", in_python(packed(StepSummary{7, {0, 1 << 20, 3}, true, {5, 0}, "note"}))},
          {"timeline", in_python(packed(Timeline{{{Phase::kForward, {{0}}, {{{0}, ArrayUseMode::kRead}}, 5}}, {1}}))},
          {"vote", in_python(packed(PlanVote{true, false, updates, true, 3, times}))}};
}

void read_message(const std::string& kind, const nb::bytes& message, int num_chunks) {
  const std::string bytes(message.c_str(), message.size());
  if (kind == "request") {
    unpacked_request(bytes, num_chunks);
  } else if (kind == "summary") {
    unpacked_summary(bytes);
  } else if (kind == "timeline") {
    unpacked_timeline(bytes, num_chunks);
  } else if (kind == "vote") {
    unpacked_vote(bytes, static_cast<size_t>(num_chunks));
  } else {
    PS_CHECK(false, ArgumentError, "there are no messages of kind ", kind);
  }
}

}  // namespace

// For tests: messages that ranks exchange in a step (engine/collectives.h, plan/), and sizes in messages of
// errors (common/sizes.h).
void register_messages(nb::module_& module) {
  module.def("example_messages", &example_messages, nb::arg("num_chunks"),
             "One example message of each kind, by kind.");
  module.def("read_message", &read_message, nb::arg("kind"), nb::arg("message"), nb::arg("num_chunks"),
             "Parses a message as a rank does. Raises StateError if it is not of that kind.");
  module.def("show_exactly", &show_exactly, nb::arg("num_bytes"), "As patrickstar.sizes.show_exactly.");
  module.def("show_enough", &show_enough, nb::arg("num_bytes"),
             "As patrickstar.sizes.enough_size, with the bytes in brackets where they differ.");
}

}  // namespace patrickstar::bind
