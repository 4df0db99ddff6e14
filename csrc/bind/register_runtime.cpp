#include <algorithm>
#include <cctype>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "bind/bind.h"
#include "bind/runtime_calls.h"
#include "common/check.h"
#include "engine/runtime_report.h"
#include "engine/step_course.h"

namespace nb = nanobind;

namespace patrickstar::bind {

namespace {

nb::dict describe_report(const RuntimeReport& report) {
  const Counters& counters = report.counters;
  nb::dict result;
  result["device_budget_bytes"] = report.device_budget_bytes;
  result["device_peak_bytes"] = report.device_peak_bytes;
  result["device_activation_bytes"] = report.device_activation_bytes;
  result["device_chunk_buffer_bytes"] = report.device_chunk_buffer_bytes;
  result["host_budget_bytes"] = report.host_budget_bytes;
  result["host_bytes"] = report.host_bytes;
  result["host_peak_bytes"] = report.host_peak_bytes;
  result["predicted_host_peak_bytes"] = report.predicted_host_peak_bytes;
  result["uploaded_bytes"] = counters.uploaded_bytes;
  result["downloaded_bytes"] = counters.downloaded_bytes;
  result["host_interleaved_nodes"] = format_cpu_list(report.interleaved_nodes);
  result["num_host_threads"] = report.num_host_threads;
  result["host_thread_cpus"] = format_cpu_list(report.pinned_cpus);
  result["num_evictions"] = counters.num_evictions;
  result["num_pressure_evictions"] = counters.num_pressure_evictions;
  result["num_prefetch_hits"] = counters.num_prefetch_hits;
  result["num_on_demand_fetches"] = counters.num_on_demand_fetches;
  result["num_accesses"] = counters.num_accesses;
  result["num_replayed_accesses"] = counters.num_replayed_accesses;
  result["num_plans"] = counters.num_plans;
  result["num_speculated_updates"] = counters.num_speculated_updates;
  result["num_scale_independent_updates"] = counters.num_scale_independent_updates;
  result["num_values_in_place"] = report.num_values_in_place;
  result["offloaded_bytes"] = counters.offloaded_bytes;
  for (size_t recipe = 1; recipe < kNumRecipes; ++recipe) {
    std::string name = kRecipes[recipe].name;
    std::transform(name.begin(), name.end(), name.begin(), [](unsigned char letter) { return std::tolower(letter); });
    result[("num_updates_" + name).c_str()] = counters.updates[recipe];
  }
  result["num_steps"] = counters.num_steps;
  result["num_skipped_steps"] = counters.num_skipped_steps;
  result["gathered_bytes"] = counters.gathered_bytes;
  result["scattered_bytes"] = counters.scattered_bytes;
  result["num_chunks"] = report.num_chunks;
  result["chunk_numel"] = report.chunk_numel;
  result["num_chunk_elements"] = report.num_chunk_elements;
  result["num_device_state_chunks"] = report.num_device_state_chunks;
  result["num_device_quantized_chunks"] = report.num_device_quantized_chunks;
  result["num_disk_chunks"] = report.num_disk_chunks;
  result["disk_bytes"] = report.disk_bytes;
  result["disk_read_bytes"] = counters.disk_read_bytes;
  result["disk_written_bytes"] = counters.disk_written_bytes;
  result["disk_wait_seconds"] = report.disk_wait_seconds;
  result["disk_io"] = report.disk_io;
  result["planned_uploaded_bytes"] = report.planned_uploaded_bytes;
  result["planned_downloaded_bytes"] = report.planned_downloaded_bytes;
  result["predicted_step_seconds"] = report.predicted_step_seconds;
  return result;
}

// None until the traced step is over.
nb::object take_trace(Runtime& self, TraceReader reader, nb::dict (*describe)(const StepTrace&)) {
  const auto trace = without_gil<Call::kInspect>(self, [reader](OpenEngine& open) { return open.traces.take(reader); });
  return trace ? nb::object(describe(*trace)) : nb::none();
}

// {"rates": Rates, "compute_seconds": [float], "updates": [Recipe], "activations": [(int, int, int)]}, as simulate()
// takes them.
nb::object describe_times(const std::optional<StepTimes>& times) {
  if (!times) return nb::none();
  nb::dict result;
  result["rates"] = times->rates;
  result["compute_seconds"] = times->shape.compute_seconds;
  result["updates"] = times->shape.updates;
  result["activations"] = describe_copies(times->shape.activations);
  return result;
}

std::optional<StepTimes> parse_times(const nb::object& times) {
  if (times.is_none()) return std::nullopt;
  StepTimes parsed{
      nb::cast<Rates>(times["rates"]),
      {nb::cast<std::vector<double>>(times["compute_seconds"]), nb::cast<std::vector<Recipe>>(times["updates"]), {}}};
  parsed.shape.activations = parse_copies(nb::cast<CopiesByAccess>(times["activations"]));
  return parsed;
}

void adopt(Runtime& self, const nb::list& accesses, const nb::object& times) {
  Timeline timeline = parse_timeline(accesses);
  std::optional<StepTimes> parsed = parse_times(times);
  without_gil<Call::kDevice>(self,
                             [&](OpenEngine& open) { adopt_timeline(open, std::move(timeline), std::move(parsed)); });
}

// None if the running step is not traced.
nb::object describe_step_so_far(Runtime& self) {
  const auto step = without_gil<Call::kDevice>(self, &step_so_far);
  if (!step) return nb::none();
  return nb::make_tuple(describe_timeline(step->timeline), describe_times(step->times), step->stall_seconds);
}

void expect(Runtime& self, const nb::list& accesses, const nb::object& times) {
  ExpectedStep expected{parse_timeline(accesses), parse_times(times)};
  without_gil<Call::kDevice>(self, [&](OpenEngine& open) { expect_step(open, std::move(expected)); });
}

struct PlacementFacts {
  DeviceBudget budget;
  int64_t host_limit_bytes = 0;
  std::vector<Tier> resting_tiers;
};

PlacementFacts placement_facts(OpenEngine& open) {
  const HostArena& arena = open.memory.arena();
  PlacementFacts facts{open.residency.budget_for_states(), arena.free_bytes() + arena.used_bytes(), {}};
  for (ChunkId chunk = 0; chunk < open.layout().num_chunks(); ++chunk) {
    facts.resting_tiers.push_back(open.memory.store().resting_tier(chunk));
  }
  return facts;
}

PlanProblem plan_problem(OpenEngine& open) {
  PlanProblem problem = open.planner.problem();
  problem.timeline = nullptr;
  return problem;
}

// For benchmark/ablation.py, after mechanisms were switched off or on.
void plan_anew(OpenEngine& open) {
  open.updates.forget_choice();
  open.planner.plan_anew();
}

void set_round_trips(OpenEngine& open, const std::vector<bool>& chunks, int64_t piece_numel) {
  PS_CHECK(chunks.empty() || static_cast<int>(chunks.size()) == open.layout().num_chunks(), ArgumentError,
           chunks.size(), " chunks have a round trip or none, of ", open.layout().num_chunks(), "; give all or none");
  constexpr Recipe kAtRest = recipe_of({Start::kCommitted, Tier::kHost, Tier::kHost});
  std::vector<Recipe> recipes;
  for (const bool round_trips : chunks) recipes.push_back(round_trips ? with_round_trip(kAtRest) : kAtRest);
  open.updates.follow(std::move(recipes), piece_numel);
}

std::shared_ptr<KeptRegions> keep_memory(OpenEngine& open) {
  auto kept = std::make_shared<KeptRegions>();
  open.memory.arena().keep_regions(kept);
  return kept;
}

void keep_absent_activations(OpenEngine& open, int64_t most_bytes) {
  open.recorder.note_activations(open.pager.activation_memory_of_running_access());
  open.recorder.count_absent(most_bytes);
}

void reset_report(OpenEngine& open) {
  open.memory.counters() = {};
  open.backend().reset_peak();
  open.memory.arena().reset_peak();
}

void register_course(RuntimeClass& runtime) {
  runtime.def("begin_forward", bound<Call::kBeginForward>(&begin_forward))
      .def("end_forward", bound<Call::kEndForward>(&end_forward))
      .def("undo_forward", bound<Call::kUndoForward>(&undo_forward))
      .def("abort_forward", bound<Call::kAbort>(&abort_forward))
      .def("begin_backward", bound<Call::kBeginBackward>(&begin_backward),
           nb::arg("expected_groups") = std::vector<GroupOptions>{}, nb::arg("expected_grad_scale") = 1.0)
      .def("end_backward", bound<Call::kEndBackward>(&end_backward))
      .def("keep_joint_backward", bound<Call::kDevice>(&keep_joint_backward))
      .def("abort_backward", bound<Call::kAbort>(&abort_backward))
      .def("meet_ranks", bound<Call::kDevice>(&meet_ranks))
      .def("sum_of_squares", bound<Call::kSumGradients>(&sum_of_squares), nb::arg("left_out") = std::vector<ParamId>())
      .def("measure_parts", bound<Call::kInspect>(&OpenEngine::flow, &GradientFlow::measure_parts))
      .def("squares_of_parts", bound<Call::kSumGradients>(&squares_of_parts),
           nb::arg("left_out") = std::vector<ParamId>())
      .def("apply_step", bound<Call::kApplyStep>(&apply_step))
      .def("skip_step", bound<Call::kSkipStep>(&skip_step))
      .def("drop_step", bound<Call::kDropStep>(&drop_step))
      .def("clear_gradients", bound<Call::kClearGradients>(&clear_gradients))
      .def("forget_plan", bound<Call::kInspect>(&OpenEngine::planner, &StepPlanner::forget_plan))
      .def("plan_anew", bound<Call::kInspect>(&plan_anew))
      .def("adopt_timeline", &adopt, nb::arg("accesses"), nb::arg("times") = nb::none())
      .def("ask_for_step_so_far",
           bound<Call::kInspect>(+[](OpenEngine& open) { open.traces.ask(TraceReader::kChoice); }))
      .def("step_so_far", &describe_step_so_far)
      .def("expect_step", &expect, nb::arg("accesses"), nb::arg("times") = nb::none())
      .def("make_states", bound<Call::kChangeChunks>(&OpenEngine::unfreezing, &Unfreezing::make_states))
      .def("discard_states", bound<Call::kDevice>(&OpenEngine::unfreezing, &Unfreezing::discard_states))
      .def("train", bound<Call::kChangeChunks>(&train))
      .def("set_round_trips", bound<Call::kInspect>(&set_round_trips), nb::arg("chunks"),
           nb::arg("piece_numel") = kRoundTripPiece,
           "For tests: chunks whose updates are GPU round trips until the next measured plan, in pieces of piece_numel "
           "elements.");
}

void register_memory_calls(RuntimeClass& runtime) {
  runtime.def("keep_memory", bound<Call::kInspect>(&keep_memory))
      .def("drop_derivable", bound<Call::kChangeChunks>(&OpenEngine::pager, &Pager::drop_derivable))
      .def("return_cached", bound<Call::kDevice>(+[](OpenEngine& open) {
             open.memory.device_buffers().trim(INT64_MAX);
             open.backend().reclaim();
           }))
      .def("copy_on_device", bound<Call::kDevice>(+[](OpenEngine& open, uintptr_t to, uintptr_t from, int64_t bytes) {
             open.backend().copy(Queue::kCompute, reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from),
                                 bytes);
           }),
           nb::arg("to"), nb::arg("from_"), nb::arg("num_bytes"))
      .def("evict_all_from_device", bound<Call::kDevice>(+[](OpenEngine& open, EvictionScope what) {
             open.updates.release_device_memory();
             open.pager.evict_all(what);
           }))
      .def("lend_device", bound<Call::kLendDevice>(&lend_device), nb::arg("keep_bytes"))
      .def("take_device_back", bound<Call::kDevice>(&take_device_back))
      .def("return_states", bound<Call::kLendDevice>(&OpenEngine::residency, &Residency::return_states))
      .def("activation_bytes",
           bound<Call::kInspect>(+[](OpenEngine& open) { return open.backend().activation_bytes(); }))
      .def("take_live_activation_peak",
           bound<Call::kInspect>(+[](OpenEngine& open) { return open.backend().take_live_activation_peak(); }))
      .def("host_room_of_activations",
           bound<Call::kInspect>(&OpenEngine::offload_store, &OffloadStore::host_room_bytes))
      .def("keep_absent_activations", bound<Call::kInspect>(&keep_absent_activations))
      .def("offload_activation", bound<Call::kDevice>(+[](OpenEngine& open, uintptr_t data, int64_t num_bytes) {
             return open.offload_store.put(reinterpret_cast<const void*>(data), num_bytes);
           }))
      .def("is_offloaded", bound<Call::kInspect>(&OpenEngine::offload_store, &OffloadStore::is_over))
      .def("settle_offloading", bound<Call::kInspect>(&OpenEngine::offload_store, &OffloadStore::settle))
      .def("finish_offloading", bound<Call::kInspect>(&OpenEngine::offload_store, &OffloadStore::finish))
      .def("fetch_activation", bound<Call::kDevice>(+[](OpenEngine& open, int64_t ticket, uintptr_t to) {
             open.offload_store.fetch(ticket, reinterpret_cast<void*>(to));
           }))
      .def("await_activation", bound<Call::kDevice>(&OpenEngine::offload_store, &OffloadStore::await))
      .def("drop_activation", &Runtime::drop_activation, ReleaseGil());
}

void register_inspection(RuntimeClass& runtime) {
  constexpr Call kInspect = Call::kInspect;
  const auto asked = [](auto function) { return bound<Call::kInspect>(+function); };
  runtime.def("start_trace", asked([](OpenEngine& open) { open.traces.ask(TraceReader::kUser); }))
      .def("take_trace", [](Runtime& self) { return take_trace(self, TraceReader::kUser, &describe_trace); })
      .def("start_stall_trace", asked([](OpenEngine& open) { open.traces.ask(TraceReader::kMonitor); }))
      .def("take_stalls", [](Runtime& self) { return take_trace(self, TraceReader::kMonitor, &describe_stalls); })
      .def_prop_ro("disk_faults", asked([](OpenEngine& open) { return open.disk.options().file.faults; }),
                   "Faults that a test injects.")
      .def_prop_ro("closed",
                   [](Runtime& self) {
                     const nb::gil_scoped_release release;
                     return self.closed();
                   })
      .def_prop_ro("step_state", asked([](OpenEngine& open) { return open.step.state(); }))
      .def_prop_ro("num_committed", bound<kInspect>(&OpenEngine::updates, &Updates::num_committed))
      .def_prop_ro("replays", bound<kInspect>(&OpenEngine::pager, &Pager::replays),
                   "True while the running step follows its plan.")
      .def_prop_ro("num_pressure_evictions",
                   asked([](OpenEngine& open) { return open.memory.counters().num_pressure_evictions; }))
      .def("report", [](Runtime& self) { return describe_report(without_gil<Call::kInspect>(self, &report_of)); })
      .def("reset_report", bound<kInspect>(&reset_report))
      .def("param_state",
           asked([](OpenEngine& open, ParamId param) { return state_name(open.memory.store().param_state(param)); }))
      .def("chunk_state",
           asked([](OpenEngine& open, ChunkId chunk) { return state_name(open.memory.store().chunk_state(chunk)); }))
      .def("is_on_device", asked([](OpenEngine& open, ChunkId chunk, ArrayKind kind) {
             return open.memory.store().array({chunk, kind}).on_device;
           }))
      .def("resting_tier",
           asked([](OpenEngine& open, ChunkId chunk) { return open.memory.store().resting_tier(chunk); }),
           "Resting tier of the chunk's optimizer states.")
      .def_prop_ro("num_accesses", asked([](OpenEngine& open) { return open.recorder.position() + 1; }))
      .def("next_scale", bound<Call::kInspect>(&OpenEngine::updates, &Updates::next_scale))
      .def("placement_facts",
           [](Runtime& self) {
             const PlacementFacts facts = without_gil<Call::kInspect>(self, &placement_facts);
             return nb::make_tuple(facts.budget, facts.host_limit_bytes, facts.resting_tiers);
           })
      .def("timeline",
           [](Runtime& self) {
             return describe_timeline(
                 without_gil<Call::kInspect>(self, [](OpenEngine& open) { return open.recorder.last(); }));
           })
      .def(
          "plan",
          [](Runtime& self) {
            return describe_plan(without_gil<Call::kInspect>(self, [](OpenEngine& open) { return open.pager.plan(); }));
          })
      .def("plan_problem",
           [](Runtime& self) { return describe_problem(without_gil<Call::kInspect>(self, &plan_problem)); })
      .def("step_times",
           [](Runtime& self) {
             return describe_times(
                 without_gil<Call::kInspect>(self, [](OpenEngine& open) { return open.planner.times(); }));
           })
      .def_prop_ro("num_measurements", bound<kInspect>(&OpenEngine::planner, &StepPlanner::num_measurements))
      .def("predicted_step", [](Runtime& self) {
        const auto step = without_gil<Call::kInspect>(self, [](OpenEngine& open) { return open.planner.predicted(); });
        return step ? nb::object(describe_step(*step)) : nb::none();
      });
}

}  // namespace

void register_runtime(nb::module_& module) {
  module.def(
      "undisturbed_times",
      [](const nb::object& earlier, const nb::object& later) {
        return describe_times(undisturbed(*parse_times(earlier), *parse_times(later)));
      },
      nb::arg("earlier"), nb::arg("later"), "Times of Runtime.step_times after a second measurement.");
  RuntimeClass runtime(module, "Runtime",
                       "The core's façade (engine/runtime.h; calls of a step: engine/step_course.h).",
                       nb::is_weak_referenceable());
  runtime
      .def(
          "__init__",
          [](ClosedWithoutGil* self, Layout layout, std::vector<std::string> param_names,
             const std::vector<std::vector<ParamId>>& module_params, const EngineOptions& options,
             std::shared_ptr<Collectives> collectives, std::shared_ptr<KeptRegions> kept) {
            if (collectives == nullptr) collectives = std::make_shared<Collectives>();
            new (self) ClosedWithoutGil(std::move(layout), std::move(param_names), module_params, options,
                                        std::move(collectives), std::move(kept));
          },
          nb::arg("layout"), nb::arg("param_names"), nb::arg("module_params"), nb::arg("options"),
          nb::arg("collectives") = nb::none(), nb::arg("kept") = nb::none(), ReleaseGil())
      .def("close", &Runtime::close, ReleaseGil());
  register_course(runtime);
  register_runtime_values(runtime);
  register_memory_calls(runtime);
  register_inspection(runtime);
}

}  // namespace patrickstar::bind
