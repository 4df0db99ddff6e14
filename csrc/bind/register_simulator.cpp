#include <array>
#include <utility>
#include <vector>

#include "bind/bind.h"
#include "plan/placement.h"
#include "plan/plan_choice.h"
#include "plan/simulator.h"

namespace nb = nanobind;

namespace patrickstar::bind {

nb::dict describe_step(const SimulatedStep& step) {
  constexpr const char* causes[kNumShortages] = {"upload", "memory", "host_update", "launch", "collective"};
  nb::dict stalls;
  for (size_t cause = 0; cause < kNumShortages; ++cause) stalls[causes[cause]] = step.stall_seconds[cause];
  nb::dict result;
  result["seconds"] = step.seconds;
  result["compute_seconds"] = step.compute_seconds;
  result["device_adam_seconds"] = step.device_adam_seconds;
  result["upload_seconds"] = step.upload_seconds;
  result["download_seconds"] = step.download_seconds;
  result["gather_seconds"] = step.gather_seconds;
  result["scatter_seconds"] = step.scatter_seconds;
  result["host_adam_seconds"] = step.host_adam_seconds;
  result["round_trip_seconds"] = step.round_trip_seconds;
  result["disk_read_seconds"] = step.disk_read_seconds;
  result["disk_write_seconds"] = step.disk_write_seconds;
  result["stall_seconds"] = stalls;
  result["uploaded_bytes"] = step.uploaded_bytes;
  result["downloaded_bytes"] = step.downloaded_bytes;
  result["gathered_bytes"] = step.gathered_bytes;
  result["scattered_bytes"] = step.scattered_bytes;
  result["disk_read_bytes"] = step.disk_read_bytes;
  result["disk_written_bytes"] = step.disk_written_bytes;
  result["peak_bytes"] = step.peak_bytes;
  return result;
}

namespace {

nb::dict describe_choice(const PlanChoice& choice) {
  nb::dict result;
  result["plan"] = describe_plan(choice.plan);
  result["prefetch_bytes"] = choice.prefetch_bytes;
  result["predicted"] = describe_step(choice.predicted);
  result["updates"] = choice.recipes;
  return result;
}

void register_choice(nb::module_& module) {
  module.def(
      "choose_plan",
      [](const OwnedProblem& given, const Rates& rates, const StepShape& shape, int64_t round_trip_bytes) {
        return describe_choice(choose_plan(given.problem, rates, shape, round_trip_bytes));
      },
      nb::arg("problem"), nb::arg("rates"), nb::arg("shape"), nb::arg("round_trip_bytes") = 0,
      "The plan with the shortest simulated step, over prefetch room, deferred updates and GPU round trips "
      "(plan/plan_choice.h).");
  module.def(
      "choose_step",
      [](const Layout& layout, const nb::list& accesses, const std::vector<bool>& states_on_device,
         const DeviceBudget& budget, const Rates& rates, StepShape shape, UpdateStart start) {
        const Timeline timeline = parse_timeline(accesses);
        PlanProblem problem =
            pose_problem(layout, timeline, {states_on_device.begin(), states_on_device.end()}, budget);
        describe_updates(layout, shape);
        const PlanChoice choice =
            choose_plan(problem, rates, shape, start == UpdateStart::kCommitted ? round_trip_bytes(layout) : 0);
        problem.prefetch_bytes = choice.prefetch_bytes;
        nb::dict result = describe_choice(choice);
        result["problem"] = describe_problem(problem);
        return result;
      },
      nb::arg("layout"), nb::arg("accesses"), nb::arg("states_on_device"), nb::arg("budget"), nb::arg("rates"),
      nb::arg("shape"), nb::arg("start"),
      "choose_plan for a layout, as by an engine with these measured times; the layout gives the shape what it knows. "
      "Returns its result and the problem. GPU round trips are allowed with optimizer-in-backward only.");
}

// Per instruction: {"op", "lane", "access", "chunk", "kind", "amount", "begin_seconds", "seconds"}; None where not
// applicable.
nb::list describe_program(const PlanProblem& problem, const Plan& plan, const Rates& rates, const StepShape& shape) {
  const PlayedProgram played = play_program(problem, plan, rates, shape);
  nb::object access = nb::none();
  nb::list result;
  for (size_t index = 0; index < played.spans.size(); ++index) {
    const Instruction& instruction = played.program.instructions[index];
    const OpRow& row = row_of(instruction.op);
    if (instruction.op == Op::kBegin) access = nb::int_(instruction.operand);
    if (instruction.op == Op::kNorm) access = nb::none();
    nb::dict fields;
    fields["op"] = row.name;
    fields["lane"] = row.lane;
    fields["access"] = access;
    fields["chunk"] = row.operand == Operand::kArray || row.operand == Operand::kChunk
                          ? nb::object(nb::int_(instruction.chunk()))
                          : nb::none();
    fields["kind"] =
        row.operand == Operand::kArray ? nb::cast(ArrayId::from_index(instruction.operand).kind) : nb::none();
    fields["amount"] = amount_of(instruction, problem, shape);
    fields["begin_seconds"] = played.spans[index].begin;
    fields["seconds"] = played.spans[index].end - played.spans[index].begin;
    result.append(fields);
  }
  return result;
}

void register_shape(nb::module_& module) {
  nb::class_<StepShape>(module, "StepShape",
                        "Properties of a step that its plan does not have (plan/step_shape.h). compute_seconds and "
                        "activations: by access; updates, numels, disk_bytes, dequantized_bytes and chunk_ranks: by "
                        "chunk.")
      .def(
          "__init__",
          [](StepShape* self, std::vector<double> compute_seconds, std::vector<Recipe> updates,
             std::vector<int64_t> numels, int num_ranks, const CopiesByAccess& activations,
             std::vector<int64_t> disk_bytes, std::vector<int64_t> dequantized_bytes, std::vector<int> chunk_ranks) {
            new (self) StepShape{std::move(compute_seconds),
                                 std::move(updates),
                                 std::move(numels),
                                 num_ranks,
                                 parse_copies(activations),
                                 std::move(disk_bytes),
                                 std::move(dequantized_bytes),
                                 std::move(chunk_ranks)};
          },
          nb::kw_only(), nb::arg("compute_seconds"), nb::arg("updates"), nb::arg("numels") = std::vector<int64_t>{},
          nb::arg("num_ranks") = 1, nb::arg("activations") = CopiesByAccess{},
          nb::arg("disk_bytes") = std::vector<int64_t>{}, nb::arg("dequantized_bytes") = std::vector<int64_t>{},
          nb::arg("chunk_ranks") = std::vector<int>{});
}

void register_recipes(nb::module_& module) {
  module.attr("PREDICTION_TOLERANCE") = kPredictionTolerance;
  module.def("cautious", &cautious, nb::arg("rates"), "Rates by which plans are compared (plan/plan_choice.h).");
  nb::enum_<UpdateStart>(module, "UpdateStart", "Earliest start of host updates (plan/recipe.h).")
      .value("AFTER_NORM", UpdateStart::kAfterNorm)
      .value("SPECULATIVE", UpdateStart::kSpeculative)
      .value("COMMITTED", UpdateStart::kCommitted);
  module.def(
      "possible_start",
      [](UpdateStart wanted, Backwards backwards, bool can_roll_back) {
        return possible_start(wanted, backwards, can_roll_back ? Rollback::kPossible : Rollback::kImpossible);
      },
      nb::arg("wanted"), nb::arg("backwards"), nb::arg("can_roll_back"),
      "The earliest update start that a step allows (plan/recipe.h).");
  nb::enum_<ExpectedScale>(module, "ExpectedScale", "Gradient scale that speculative updates assume (plan/recipe.h).")
      .value("EXACT", ExpectedScale::kExact)
      .value("BETWEEN", ExpectedScale::kBetween);
  module.def(
      "earliest_recipe",
      [](bool trainable, DType dtype, Tier states, UpdateStart start, Ahead ahead, ExpectedScale scale) {
        return earliest_recipe({trainable, dtype, states, ahead}, start, scale);
      },
      nb::arg("trainable"), nb::arg("dtype"), nb::arg("states"), nb::arg("start"), nb::arg("ahead") = Ahead::kNothing,
      nb::arg("scale") = ExpectedScale::kExact, "The earliest-starting recipe that fits memory (plan/recipe.h).");
}

}  // namespace

void register_simulator(nb::module_& module) {
  nb::enum_<Recipe> recipes(module, "Recipe", "Way to update a chunk (plan/recipe.h).");
  for (size_t index = 0; index < kNumRecipes; ++index) recipes.value(kRecipes[index].name, static_cast<Recipe>(index));
  recipes.def_prop_ro(
      "states", [](Recipe recipe) { return row_of(recipe).states; }, "Resting tier of the chunk's optimizer states.");
  recipes.def_prop_ro(
      "starts_in_backward", [](Recipe recipe) { return starts_in_backward(row_of(recipe)); },
      "True where it begins before the norm of all gradients is known.");
  nb::enum_<Lane>(module, "Lane", "The queue or worker that is busy with an instruction (plan/ops.h).")
      .value("LAUNCH", Lane::kLaunch)
      .value("COMPUTE", Lane::kCompute)
      .value("UPLOAD", Lane::kUpload)
      .value("DOWNLOAD", Lane::kDownload)
      .value("GATHER", Lane::kGather)
      .value("SCATTER", Lane::kScatter)
      .value("HOST", Lane::kHost)
      .value("DISK_READ", Lane::kDiskRead)
      .value("DISK_HOST", Lane::kDiskHost)
      .value("DISK_WRITE", Lane::kDiskWrite)
      .value("ROUND_TRIP", Lane::kRoundTrip);
  nb::class_<Rates>(module, "Rates", "Rates of a machine (plan/simulator.h).")
      .def(nb::init<>())
      .def_rw("upload_gbps", &Rates::upload_gbps)
      .def_rw("download_gbps", &Rates::download_gbps)
      .def_rw("transfer_latency_seconds", &Rates::transfer_latency_seconds)
      .def_rw("gather_gbps", &Rates::gather_gbps)
      .def_rw("scatter_gbps", &Rates::scatter_gbps)
      .def_rw("collective_latency_seconds", &Rates::collective_latency_seconds)
      .def_rw("host_adam_params_per_second", &Rates::host_adam_params_per_second)
      .def_rw("param_pass", &Rates::param_pass)
      .def_rw("states_pass", &Rates::states_pass)
      .def_rw("device_adam_params_per_second", &Rates::device_adam_params_per_second)
      .def_rw("device_memory_gbps", &Rates::device_memory_gbps)
      .def_rw("disk_read_gbps", &Rates::disk_read_gbps)
      .def_rw("disk_write_gbps", &Rates::disk_write_gbps)
      .def_rw("synchronize_seconds", &Rates::synchronize_seconds)
      .def_rw("launch_ahead_seconds", &Rates::launch_ahead_seconds);
  register_shape(module);
  module.def(
      "simulate",
      [](const OwnedProblem& given, const nb::dict& plan, const Rates& rates, const StepShape& shape) {
        return describe_step(simulate(given.problem, parse_plan(plan), rates, shape));
      },
      nb::arg("problem"), nb::arg("plan"), nb::arg("rates"), nb::arg("shape"),
      "Simulates a plan's steady step (plan/simulator.h).");
  module.def(
      "play_program",
      [](const OwnedProblem& given, const nb::dict& plan, const Rates& rates, const StepShape& shape) {
        return describe_program(given.problem, parse_plan(plan), rates, shape);
      },
      nb::arg("problem"), nb::arg("plan"), nb::arg("rates"), nb::arg("shape"),
      "Instructions of the simulated step in issue order, with their times (plan/ops.h).");
  register_recipes(module);
  register_choice(module);
}

}  // namespace patrickstar::bind
