// One register_* per concept, called by module.cpp.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "common/timeline.h"
#include "plan/planner.h"
#include "plan/simulator.h"
#include "trace/step_tracer.h"

namespace patrickstar::bind {

using ReleaseGil = nanobind::call_guard<nanobind::gil_scoped_release>;
using Address = uintptr_t;

// A constructor of classes that the core shares. They derive from std::enable_shared_from_this: otherwise nanobind
// hands out pointers whose last owner takes the GIL, for which threads of the core must not wait.
template <class Shared, class... Args>
auto init_shared() {
  return nanobind::new_([](Args... args) { return std::make_shared<Shared>(std::move(args)...); });
}

template <class Element>
Element* pointer(Address address) {
  return reinterpret_cast<Element*>(address);
}

void register_build(nanobind::module_& module);
void register_errors(nanobind::module_& module);
void register_types(nanobind::module_& module);
void register_threads(nanobind::module_& module);
void register_checksum(nanobind::module_& module);
void register_optim(nanobind::module_& module);
void register_momentum_rule(nanobind::module_& module);
void register_update_arguments(nanobind::module_& module);
void register_update_kernels(nanobind::module_& module);
void register_cuda_kernels(nanobind::module_& module);  // CUDA builds only
void register_loss_scaler(nanobind::module_& module);
void register_quant(nanobind::module_& module);
void register_experts(nanobind::module_& module);
void register_fp8(nanobind::module_& module);
void register_plan(nanobind::module_& module);
void register_simulator(nanobind::module_& module);
void register_plan_vote(nanobind::module_& module);
void register_messages(nanobind::module_& module);
void register_collective(nanobind::module_& module);
void register_memory(nanobind::module_& module);
void register_disk(nanobind::module_& module);
void register_trace(nanobind::module_& module);
void register_observer(nanobind::module_& module);
void register_engine_options(nanobind::module_& module);
void register_runtime(nanobind::module_& module);
void register_gradient_hook(nanobind::module_& module);

// Conversions between C++ types and Python lists and dicts.
nanobind::list describe_timeline(const Timeline& timeline);
nanobind::dict describe_plan(const Plan& plan);
// A problem that keeps its timeline; in Python PlanProblem.
struct OwnedProblem {
  OwnedProblem(Timeline of, PlanProblem rest) : timeline(std::move(of)), problem(std::move(rest)) {
    problem.timeline = &timeline;
  }
  OwnedProblem(const OwnedProblem&) = delete;
  OwnedProblem& operator=(const OwnedProblem&) = delete;

  Timeline timeline;
  PlanProblem problem;
};
// A traced step; describe_stalls(): {"seconds", "stalled_seconds": {StallCause: seconds}}.
nanobind::dict describe_trace(const StepTrace& trace);
nanobind::dict describe_stalls(const StepTrace& trace);
// Arguments of PlanProblem, accesses aside.
nanobind::dict describe_problem(const PlanProblem& problem);
Timeline parse_timeline(const nanobind::list& accesses);
Plan parse_plan(const nanobind::dict& plan);
// {(chunk, kind): (num_bytes, fetch_bytes, evict_bytes, finalise_bytes, survives_step)}
using CostMap = std::map<std::pair<ChunkId, ArrayKind>, std::tuple<int64_t, int64_t, int64_t, int64_t, bool>>;
std::vector<ArrayCost> parse_costs(const CostMap& costs, const Timeline& timeline);
// By chunk: fields of RoundTripCost.
using RoundTripCosts = std::vector<std::tuple<int64_t, int64_t, int64_t>>;
std::vector<RoundTripCost> parse_round_trips(const RoundTripCosts& costs);
// By access: fields of ActivationCopies (bytes leaving, returning, needed).
using CopiesByAccess = std::vector<std::array<int64_t, 3>>;
std::vector<ActivationCopies> parse_copies(const CopiesByAccess& accesses);
CopiesByAccess describe_copies(const std::vector<ActivationCopies>& accesses);
nanobind::dict describe_step(const SimulatedStep& step);

}  // namespace patrickstar::bind
