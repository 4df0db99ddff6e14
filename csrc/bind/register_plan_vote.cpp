#include <pybind11/stl.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "bind/bind.h"
#include "plan/plan_vote.h"

namespace py = pybind11;

namespace patrickstar::bind {

namespace {

PlanVote parse_vote(const py::dict& fields) {
  PlanVote vote;
  vote.can_measure = fields["can_measure"].cast<bool>();
  vote.has_plan = fields["has_plan"].cast<bool>();
  vote.updates = fields["updates"].cast<std::vector<Recipe>>();
  if (!fields["rates"].is_none()) {
    vote.times =
        StepTimes{fields["rates"].cast<Rates>(), {fields["compute_seconds"].cast<std::vector<double>>(), {}, {}}};
    vote.times->shape.activations = parse_copies(fields["activations"].cast<CopiesByAccess>());
  }
  return vote;
}

py::dict describe_vote(const PlanVote& vote) {
  py::dict fields;
  fields["can_measure"] = vote.can_measure;
  fields["has_plan"] = vote.has_plan;
  fields["updates"] = vote.updates;
  fields["rates"] = vote.times ? py::cast(vote.times->rates) : py::none();
  fields["compute_seconds"] = vote.times ? vote.times->shape.compute_seconds : std::vector<double>{};
  fields["activations"] = vote.times ? describe_copies(vote.times->shape.activations) : CopiesByAccess{};
  return fields;
}

}  // namespace

void register_plan_vote(py::module_& module) {
  module.def(
      "agreed_vote",
      [](const std::vector<py::dict>& votes) {
        std::vector<PlanVote> received;
        for (const py::dict& fields : votes) {
          const PlanVote vote = parse_vote(fields);
          received.push_back(unpacked_vote(packed(vote), vote.updates.size()));
        }
        return describe_vote(agreed(received));
      },
      py::arg("votes"), "The values that all ranks plan with, after an exchange of these votes (plan/plan_vote.h).");
}

}  // namespace patrickstar::bind
