#include <pybind11/stl.h>

#include "bind/bind.h"
#include "plan/planner.h"

namespace py = pybind11;

namespace patrickstar::bind {

namespace {

py::tuple describe_array(ArrayId id) { return py::make_tuple(id.chunk, id.kind); }

py::list describe_arrays(const std::vector<ArrayId>& arrays) {
  py::list result;
  for (ArrayId id : arrays) result.append(describe_array(id));
  return result;
}

// moments: [{"phase": Phase, "accesses": [(chunk, kind, mode), ...], "tide_peak_bytes": int}, ...]
Timeline parse_timeline(const py::list& moments) {
  Timeline timeline;
  for (const py::handle& item : moments) {
    const auto fields = py::cast<py::dict>(item);
    Moment moment;
    moment.phase = fields["phase"].cast<Phase>();
    moment.tide_peak_bytes = fields["tide_peak_bytes"].cast<int64_t>();
    for (const py::handle& access_item : fields["accesses"]) {
      const auto access = py::cast<py::tuple>(access_item);
      moment.accesses.push_back(
          {{access[0].cast<ChunkId>(), access[1].cast<ArrayKind>()}, access[2].cast<AccessMode>()});
    }
    timeline.moments.push_back(std::move(moment));
  }
  return timeline;
}

}  // namespace

py::list describe_timeline(const Timeline& timeline) {
  py::list moments;
  for (const Moment& moment : timeline.moments) {
    py::list accesses;
    for (const Access& access : moment.accesses)
      accesses.append(py::make_tuple(access.array.chunk, access.array.kind, access.mode));
    py::dict fields;
    fields["phase"] = moment.phase;
    fields["accesses"] = accesses;
    fields["tide_peak_bytes"] = moment.tide_peak_bytes;
    moments.append(fields);
  }
  return moments;
}

py::dict describe_plan(const Plan& plan) {
  py::list moments;
  for (const MomentPlan& moment : plan.moments) {
    py::dict fields;
    fields["evict"] = describe_arrays(moment.evict);
    fields["fetch"] = describe_arrays(moment.fetch);
    fields["evict_ahead"] = describe_arrays(moment.evict_ahead);
    fields["prefetch"] = describe_arrays(moment.prefetch);
    moments.append(fields);
  }
  py::dict result;
  result["moments"] = moments;
  result["uploaded_bytes"] = plan.uploaded_bytes;
  result["downloaded_bytes"] = plan.downloaded_bytes;
  result["least_limit_bytes"] = plan.least_limit_bytes;
  return result;
}

void register_plan(py::module_& module) {
  py::enum_<Phase>(module, "Phase").value("FORWARD", Phase::kForward).value("BACKWARD", Phase::kBackward);
  py::enum_<AccessMode>(module, "AccessMode")
      .value("READ", AccessMode::kRead)
      .value("WRITE", AccessMode::kWrite)
      .value("RETIRE", AccessMode::kRetire);
  module.def(
      "make_plan",
      [](const py::list& moments,
         const std::map<std::pair<ChunkId, ArrayKind>, std::tuple<int64_t, int64_t, int64_t, int64_t, bool>>& costs,
         int64_t limit_bytes, int64_t fixed_bytes, int64_t prefetch_bytes) {
        const Timeline timeline = parse_timeline(moments);
        PlanProblem problem;
        problem.timeline = &timeline;
        problem.limit_bytes = limit_bytes;
        problem.fixed_bytes = fixed_bytes;
        problem.prefetch_bytes = prefetch_bytes;
        for (const auto& [key, cost] : costs) {
          const auto index = static_cast<size_t>(ArrayId{key.first, key.second}.index());
          if (problem.arrays.size() <= index) problem.arrays.resize(index + 1);
          const auto& [num_bytes, fetch, evict, retire, survives] = cost;
          problem.arrays[index] = {num_bytes, fetch, evict, retire, survives};
        }
        return describe_plan(make_plan(problem));
      },
      py::arg("moments"), py::arg("costs"), py::kw_only(), py::arg("limit_bytes"), py::arg("fixed_bytes") = 0,
      py::arg("prefetch_bytes") = 0,
      "Plan for a timeline. costs: {(chunk, kind): (num_bytes, fetch_bytes, evict_bytes, retire_bytes, "
      "survives_step)}.");
}

}  // namespace patrickstar::bind
