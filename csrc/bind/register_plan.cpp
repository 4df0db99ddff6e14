#include <algorithm>
#include <optional>
#include <tuple>

#include "bind/bind.h"
#include "chunk/layout.h"
#include "plan/host_demand.h"
#include "plan/placement.h"
#include "plan/planner.h"
#include "plan/played_uses.h"
#include "plan/resting_tiers.h"
#include "plan/timeline_merge.h"

namespace nb = nanobind;

namespace patrickstar::bind {

namespace {

// Fields of ParamUse.
using UseTuple = std::tuple<UseCall, std::vector<ParamId>, std::optional<HoldUntil>, Tick, Tick>;

nb::tuple describe_array(ArrayId id) { return nb::make_tuple(id.chunk, id.kind); }

nb::list describe_arrays(const std::vector<ArrayId>& arrays) {
  nb::list result;
  for (ArrayId id : arrays) result.append(describe_array(id));
  return result;
}

std::vector<ArrayId> parse_arrays(const nb::handle& arrays) {
  std::vector<ArrayId> result;
  for (const auto& [chunk, kind] : nb::cast<std::vector<std::pair<ChunkId, ArrayKind>>>(arrays))
    result.push_back({chunk, kind});
  return result;
}

nb::dict describe_costs(const std::vector<ArrayCost>& arrays) {
  nb::dict costs;
  for (size_t index = 0; index < arrays.size(); ++index) {
    const ArrayCost& cost = arrays[index];
    if (cost.num_bytes == 0) continue;
    costs[describe_array(ArrayId::from_index(static_cast<int>(index)))] =
        nb::make_tuple(cost.num_bytes, cost.fetch_bytes, cost.evict_bytes, cost.finalise_bytes, cost.survives_step);
  }
  return costs;
}

void register_placement(nb::module_& module) {
  module.attr("CUDA_SLACK_RATIO") = kCudaSlackRatio;
  nb::enum_<Backwards>(module, "Backwards", "Number of backwards per step (plan/chunk_bytes.h).")
      .value("ONE", Backwards::kOne)
      .value("SEVERAL", Backwards::kSeveral);
  nb::class_<DeviceBudget>(module, "DeviceBudget", "Device memory available to the planner (plan/placement.h).")
      .def(nb::init<>())
      .def_rw("limit_bytes", &DeviceBudget::limit_bytes)
      .def_rw("follows_activations", &DeviceBudget::follows_activations)
      .def_rw("prefetches_far", &DeviceBudget::prefetches_far)
      .def_rw("margin_use_ratio", &DeviceBudget::margin_use_ratio)
      .def_rw("keeps_gradients", &DeviceBudget::keeps_gradients)
      .def_rw("backwards", &DeviceBudget::backwards)
      .def_rw("gradient_activation_bytes", &DeviceBudget::gradient_activation_bytes)
      .def_rw("host_limit_bytes", &DeviceBudget::host_limit_bytes)
      .def_rw("gradient_room_bytes", &DeviceBudget::gradient_room_bytes);
  module.def("gradient_room_bytes", &gradient_room_bytes, nb::arg("layout"), nb::arg("resting_tiers"),
             nb::arg("host_limit_bytes"),
             "Host bytes that these resting tiers leave to gradients without a fixed place; UNLIMITED if all have one "
             "(plan/resting_tiers.h).");
  module.def(
      "round_trip_costs",
      [](const Layout& layout) {
        std::vector<std::tuple<int64_t, int64_t, int64_t>> costs;
        for (const RoundTripCost& cost : round_trip_costs(layout)) {
          costs.emplace_back(cost.up_bytes, cost.down_bytes, cost.value_bytes);
        }
        return costs;
      },
      nb::arg("layout"),
      "By chunk, RoundTripCost of a GPU round-trip update: bytes up, bytes down, and the part of up that is skipped if "
      "the "
      "device has the compute value.");
  module.def(
      "chunks_that_move_in",
      [](const Layout& layout, int count, const std::vector<bool>& states_on_device) {
        return chunks_that_move_in(layout, count, {states_on_device.begin(), states_on_device.end()});
      },
      nb::arg("layout"), nb::arg("count"), nb::arg("states_on_device"),
      "Chunks among the first count whose states move to the device, beside the states there.");
  module.def(
      "puts_values_in_place",
      [](const Layout& layout) {
        const auto& chunks = layout.chunks();
        return std::any_of(chunks.begin(), chunks.end(),
                           [](const ChunkSpec& chunk) { return chunk.trainable && chunk.puts_values_in_place(); });
      },
      nb::arg("layout"), "True if speculative updates of any chunk are in place (optim/kernels.h).");
  module.def("reserved_gradient_bytes", &reserved_gradient_bytes, nb::arg("layout"),
             "Host bytes that speculative updates leave to downloading gradients.");
  module.def(
      "initial_placement",
      [](const Layout& layout, int64_t host_limit_bytes, int64_t device_room_bytes, Backwards backwards,
         int64_t disk_limit_bytes) {
        const InitialPlacement placement =
            initial_placement(layout, host_limit_bytes, device_room_bytes, backwards, disk_limit_bytes);
        return nb::make_tuple(placement.resting_tiers, placement.host_bytes, placement.disk_bytes);
      },
      nb::arg("layout"), nb::arg("host_limit_bytes"), nb::arg("device_room_bytes"),
      nb::arg("backwards") = Backwards::kOne, nb::arg("disk_limit_bytes") = 0,
      "Resting tiers by chunk before activation memory is known, host bytes, disk bytes. More host bytes than the "
      "limit: all tiers together are too small (plan/resting_tiers.h).");
  module.def(
      "later_resting_tiers",
      [](const Layout& layout, const std::vector<Tier>& first_resting_tiers, const std::vector<bool>& states_on_device,
         int64_t host_limit_bytes, Backwards backwards) {
        const std::vector<uint8_t> on_device(states_on_device.begin(), states_on_device.end());
        return later_resting_tiers(layout, first_resting_tiers, on_device, host_limit_bytes, backwards);
      },
      nb::arg("layout"), nb::arg("first_resting_tiers"), nb::arg("states_on_device"), nb::arg("host_limit_bytes"),
      nb::arg("backwards") = Backwards::kOne,
      "Resting tiers by chunk once activation memory is known. Disk states move to the host as far as it has room "
      "(plan/resting_tiers.h).");
  module.def("bytes_on_host", &bytes_on_host, nb::arg("layout"), nb::arg("resting_tiers"),
             nb::arg("backwards") = Backwards::kOne,
             "Host bytes of chunks with these resting tiers, without the buffer sets of the disk.");
  module.def(
      "disk_set_bytes",
      [](const Layout& layout, const std::vector<Tier>& resting_tiers) {
        return disk_sets(layout, resting_tiers).num_bytes();
      },
      nb::arg("layout"), nb::arg("resting_tiers"),
      "Host bytes of the buffer sets through which disk states pass (plan/chunk_bytes.h).");
  nb::enum_<Ahead>(module, "Ahead", "Part of a chunk's update that runs before the norm is known (plan/host_demand.h).")
      .value("NOTHING", Ahead::kNothing)
      .value("PARAM", Ahead::kParam)
      .value("EVERYTHING", Ahead::kEverything);
  module.def(
      "choose_ahead",
      [](const Layout& layout, const std::vector<Tier>& resting_tiers, int64_t room_bytes) {
        return choose_ahead(new_bytes_on_host(layout, resting_tiers), {room_bytes, room_bytes}).chosen;
      },
      nb::arg("layout"), nb::arg("resting_tiers"), nb::arg("room_bytes"),
      "By chunk, the part of its update that room_bytes of host memory allow before the norm (plan/host_demand.h).");
  module.def(
      "host_peak_bytes",
      [](const Layout& layout, const std::vector<Tier>& resting_tiers, const std::vector<bool>& states_on_device,
         int64_t host_limit_bytes, bool updates_ahead, Backwards backwards) {
        return host_peak_bytes(layout, resting_tiers, {states_on_device.begin(), states_on_device.end()},
                               host_limit_bytes,
                               updates_ahead ? NewValuesAhead::kWhereThereIsRoom : NewValuesAhead::kNever, backwards);
      },
      nb::arg("layout"), nb::arg("first_resting_tiers"), nb::arg("states_on_device"), nb::arg("host_limit_bytes"),
      nb::arg("updates_ahead"), nb::arg("backwards") = Backwards::kOne,
      "Peak host memory that a rank maps (plan/host_demand.h). first_resting_tiers: tiers before activation memory was "
      "known; "
      "states_on_device: by chunk, now.");
  nb::enum_<UseCall>(module, "UseCall", "A call that reports parameter uses (plan/played_uses.h).")
      .value("OPEN_SCOPE", UseCall::kOpenScope)
      .value("CLOSE_SCOPE", UseCall::kCloseScope)
      .value("TOUCH", UseCall::kTouch)
      .value("END_FORWARD", UseCall::kEndForward)
      .value("ENTER_BACKWARD", UseCall::kEnterBackward)
      .value("ACCUMULATE", UseCall::kAccumulate);
  module.def(
      "play_uses",
      [](const Layout& layout, const std::vector<bool>& states_on_device, const std::vector<UseTuple>& uses) {
        std::vector<ParamUse> calls;
        for (const auto& [call, params, until, begin, end] : uses)
          calls.push_back({call, params, until.value_or(HoldUntil::kScopeEnd), begin, end});
        const PlayedUses played = play_uses(layout, {states_on_device.begin(), states_on_device.end()}, calls);
        return nb::make_tuple(describe_timeline(played.timeline), played.access_of, played.waste_bytes);
      },
      nb::arg("layout"), nb::arg("states_on_device"), nb::arg("uses"),
      "Returns the timeline that an engine would record, by use the current access after it (-1: none), and the most "
      "bytes held at an access beside its own parameters. Uses are (call, params, until, begin, end).");
  module.def(
      "num_device_state_chunks",
      [](const Layout& layout, const nb::list& accesses, const DeviceBudget& budget) {
        return num_device_state_chunks(layout, parse_timeline(accesses), budget);
      },
      nb::arg("layout"), nb::arg("accesses"), nb::arg("budget"),
      "Number of chunks, from the first on, with states on the device (plan/placement.h).");
  module.def(
      "leaving_gradient_bytes",
      [](const Layout& layout, const nb::list& accesses, const std::vector<bool>& states_on_device,
         const DeviceBudget& budget) {
        const std::vector<uint8_t> on_device(states_on_device.begin(), states_on_device.end());
        return leaving_gradient_bytes(layout, parse_timeline(accesses), on_device, budget);
      },
      nb::arg("layout"), nb::arg("accesses"), nb::arg("states_on_device"), nb::arg("budget"),
      "Bytes of gradients that wait for the norm on the host, for lack of device memory (plan/placement.h).");
  module.def(
      "merged_timelines",
      [](const nb::list& a, const nb::list& b, int num_chunks) {
        const Timeline received = unpacked_timeline(packed(parse_timeline(b)), num_chunks);
        return describe_timeline(merged(parse_timeline(a), received));
      },
      nb::arg("a"), nb::arg("b"), nb::arg("num_chunks"),
      "The accesses of both in one timeline, after an exchange of one of them (plan/timeline_merge.h).");
  module.def(
      "pose_problem",
      [](const Layout& layout, const nb::list& accesses, const std::vector<bool>& states_on_device,
         const DeviceBudget& budget) {
        const Timeline timeline = parse_timeline(accesses);
        const std::vector<uint8_t> on_device(states_on_device.begin(), states_on_device.end());
        return describe_problem(pose_problem(layout, timeline, on_device, budget));
      },
      nb::arg("layout"), nb::arg("accesses"), nb::arg("states_on_device"), nb::arg("budget"),
      "The planner's problem for a timeline: the arguments of PlanProblem, accesses aside (plan/placement.h).");
}

}  // namespace

// accesses: [{"phase": Phase, "uses": [(chunk, kind, mode), ...], "activation_peak_bytes": int}, ...]. Optional
// "ends_phases": number of forwards and backwards that end after the entry.
Timeline parse_timeline(const nb::list& accesses) {
  Timeline timeline;
  for (const nb::handle& item : accesses) {
    const auto fields = nb::cast<nb::dict>(item);
    Access access;
    access.phase = nb::cast<Phase>(fields["phase"]);
    access.activation_peak_bytes = nb::cast<int64_t>(fields["activation_peak_bytes"]);
    for (const nb::handle& use_item : fields["uses"]) {
      access.uses.push_back(
          {{nb::cast<ChunkId>(use_item[0]), nb::cast<ArrayKind>(use_item[1])}, nb::cast<ArrayUseMode>(use_item[2])});
      // Reads acquire their arrays when the access begins.
      if (access.uses.back().mode == ArrayUseMode::kRead) access.acquired.push_back(access.uses.back().array);
    }
    timeline.accesses.push_back(std::move(access));
    const int64_t num_ended = fields.contains("ends_phases") ? nb::cast<int64_t>(fields["ends_phases"]) : 0;
    timeline.phase_ends.insert(timeline.phase_ends.end(), static_cast<size_t>(std::max<int64_t>(num_ended, 0)),
                               static_cast<int64_t>(timeline.accesses.size()));
  }
  return timeline;
}

nb::dict describe_problem(const PlanProblem& problem) {
  nb::dict result;
  result["costs"] = describe_costs(problem.arrays);
  result["limit_bytes"] = problem.limit_bytes;
  result["least_activation_bytes"] = problem.least_activation_bytes;
  result["fixed_bytes"] = problem.fixed_bytes;
  result["prefetch_bytes"] = problem.prefetch_bytes;
  result["idle_bytes"] = problem.idle_bytes;
  result["gradient_room_bytes"] = problem.gradient_room_bytes;
  RoundTripCosts round_trips;
  for (const RoundTripCost& cost : problem.round_trips)
    round_trips.emplace_back(cost.up_bytes, cost.down_bytes, cost.value_bytes);
  result["round_trip_costs"] = round_trips;
  return result;
}

std::vector<RoundTripCost> parse_round_trips(const RoundTripCosts& costs) {
  std::vector<RoundTripCost> result;
  for (const auto& [up_bytes, down_bytes, value_bytes] : costs) result.push_back({up_bytes, down_bytes, value_bytes});
  return result;
}

std::vector<ActivationCopies> parse_copies(const CopiesByAccess& accesses) {
  std::vector<ActivationCopies> result;
  for (const auto& [leaving, coming, needed] : accesses) result.push_back({leaving, coming, needed});
  return result;
}

CopiesByAccess describe_copies(const std::vector<ActivationCopies>& accesses) {
  CopiesByAccess result;
  for (const ActivationCopies& access : accesses) {
    result.push_back({access.leaving_bytes, access.coming_bytes, access.needed_bytes});
  }
  return result;
}

Plan parse_plan(const nb::dict& fields) {
  Plan plan;
  for (const nb::handle& item : fields["accesses"]) {
    plan.accesses.push_back({parse_arrays(item["evict"]), parse_arrays(item["fetch"]),
                             parse_arrays(item["evict_ahead"]), parse_arrays(item["prefetch"])});
  }
  plan.uploaded_bytes = nb::cast<int64_t>(fields["uploaded_bytes"]);
  plan.downloaded_bytes = nb::cast<int64_t>(fields["downloaded_bytes"]);
  plan.least_limit_bytes = nb::cast<int64_t>(fields["least_limit_bytes"]);
  return plan;
}

std::vector<ArrayCost> parse_costs(const CostMap& costs, const Timeline& timeline) {
  std::vector<ArrayCost> arrays;
  // All kinds of a chunk have entries.
  const auto make = [&arrays](ChunkId chunk) {
    arrays.resize(std::max(arrays.size(), (static_cast<size_t>(chunk) + 1) * kNumArrayKinds));
  };
  for (const Access& access : timeline.accesses) {
    for (const ArrayUse& use : access.uses) make(use.array.chunk);
  }
  for (const auto& [key, cost] : costs) {
    const auto index = static_cast<size_t>(ArrayId{key.first, key.second}.index());
    make(key.first);
    const auto& [num_bytes, fetch, evict, finalise, survives] = cost;
    arrays[index] = {num_bytes, fetch, evict, finalise, survives};
  }
  return arrays;
}

nb::list describe_timeline(const Timeline& timeline) {
  nb::list accesses;
  for (const Access& access : timeline.accesses) {
    nb::list uses;
    for (const ArrayUse& use : access.uses) uses.append(nb::make_tuple(use.array.chunk, use.array.kind, use.mode));
    nb::dict fields;
    fields["phase"] = access.phase;
    fields["uses"] = uses;
    fields["activation_peak_bytes"] = access.activation_peak_bytes;
    const auto& ends = timeline.phase_ends;
    const auto num_ended = std::count(ends.begin(), ends.end(), static_cast<int64_t>(accesses.size()) + 1);
    if (num_ended > 0) fields["ends_phases"] = num_ended;
    accesses.append(fields);
  }
  return accesses;
}

nb::dict describe_plan(const Plan& plan) {
  nb::list accesses;
  for (const AccessPlan& access : plan.accesses) {
    nb::dict fields;
    fields["evict"] = describe_arrays(access.evict);
    fields["fetch"] = describe_arrays(access.fetch);
    fields["evict_ahead"] = describe_arrays(access.evict_ahead);
    fields["prefetch"] = describe_arrays(access.prefetch);
    accesses.append(fields);
  }
  nb::dict result;
  result["accesses"] = accesses;
  result["uploaded_bytes"] = plan.uploaded_bytes;
  result["downloaded_bytes"] = plan.downloaded_bytes;
  result["least_limit_bytes"] = plan.least_limit_bytes;
  return result;
}

void register_plan(nb::module_& module) {
  nb::enum_<Phase>(module, "Phase").value("FORWARD", Phase::kForward).value("BACKWARD", Phase::kBackward);
  nb::enum_<ArrayUseMode>(module, "ArrayUseMode")
      .value("READ", ArrayUseMode::kRead)
      .value("WRITE", ArrayUseMode::kWrite)
      .value("FINALISE", ArrayUseMode::kFinalise);
  nb::class_<OwnedProblem>(module, "PlanProblem",
                           "A timeline, the costs of its arrays and limits of memory (plan/planner.h). costs: {(chunk, "
                           "kind): (num_bytes, fetch_bytes, evict_bytes, finalise_bytes, survives_step)}, arrays of 0 "
                           "bytes left out. idle_bytes: by access, or empty. round_trip_costs: by chunk, or empty.")
      .def(
          "__init__",
          [](OwnedProblem* self, const nb::list& accesses, const CostMap& costs, int64_t limit_bytes,
             int64_t least_activation_bytes, int64_t fixed_bytes, int64_t prefetch_bytes,
             std::vector<int64_t> idle_bytes, int64_t gradient_room_bytes, const RoundTripCosts& round_trip_costs) {
            Timeline timeline = parse_timeline(accesses);
            PlanProblem problem{nullptr,
                                parse_costs(costs, timeline),
                                limit_bytes,
                                least_activation_bytes,
                                fixed_bytes,
                                prefetch_bytes,
                                std::move(idle_bytes),
                                gradient_room_bytes,
                                parse_round_trips(round_trip_costs)};
            new (self) OwnedProblem(std::move(timeline), std::move(problem));
          },
          nb::arg("accesses"), nb::arg("costs"), nb::kw_only(), nb::arg("limit_bytes"),
          nb::arg("least_activation_bytes") = 0, nb::arg("fixed_bytes") = 0, nb::arg("prefetch_bytes") = 0,
          nb::arg("idle_bytes") = std::vector<int64_t>{}, nb::arg("gradient_room_bytes") = INT64_MAX,
          nb::arg("round_trip_costs") = RoundTripCosts{});
  module.def(
      "make_plan", [](const OwnedProblem& given) { return describe_plan(make_plan(given.problem)); },
      nb::arg("problem"), "Plans a timeline (plan/planner.h).");
  register_placement(module);
}

}  // namespace patrickstar::bind
