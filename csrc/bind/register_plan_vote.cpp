#include <cstdint>
#include <optional>
#include <vector>

#include "bind/bind.h"
#include "plan/plan_vote.h"

namespace nb = nanobind;

namespace patrickstar::bind {

namespace {

PlanVote parse_vote(const nb::dict& fields) {
  PlanVote vote;
  vote.can_measure = nb::cast<bool>(fields["can_measure"]);
  vote.has_plan = nb::cast<bool>(fields["has_plan"]);
  vote.updates = nb::cast<std::vector<Recipe>>(fields["updates"]);
  vote.awaits_trace = nb::cast<bool>(fields["awaits_trace"]);
  vote.timed_path = nb::cast<int64_t>(fields["timed_path"]);
  if (!fields["rates"].is_none()) {
    vote.times =
        StepTimes{nb::cast<Rates>(fields["rates"]), {nb::cast<std::vector<double>>(fields["compute_seconds"]), {}, {}}};
    vote.times->shape.activations = parse_copies(nb::cast<CopiesByAccess>(fields["activations"]));
  }
  return vote;
}

nb::dict describe_vote(const PlanVote& vote) {
  nb::dict fields;
  fields["can_measure"] = vote.can_measure;
  fields["has_plan"] = vote.has_plan;
  fields["updates"] = vote.updates;
  fields["awaits_trace"] = vote.awaits_trace;
  fields["timed_path"] = vote.timed_path;
  fields["rates"] = vote.times ? nb::cast(vote.times->rates) : nb::none();
  fields["compute_seconds"] = vote.times ? vote.times->shape.compute_seconds : std::vector<double>{};
  fields["activations"] = vote.times ? describe_copies(vote.times->shape.activations) : CopiesByAccess{};
  return fields;
}

}  // namespace

void register_plan_vote(nb::module_& module) {
  module.def(
      "agreed_vote",
      [](const std::vector<nb::dict>& votes) {
        std::vector<PlanVote> received;
        for (const nb::dict& fields : votes) {
          const PlanVote vote = parse_vote(fields);
          received.push_back(unpacked_vote(packed(vote), vote.updates.size()));
        }
        return describe_vote(agreed(received));
      },
      nb::arg("votes"), "The values that all ranks plan with, after an exchange of these votes (plan/plan_vote.h).");
}

}  // namespace patrickstar::bind
