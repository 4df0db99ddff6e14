// One register_* per concept, called by module.cpp.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <cstdint>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

#include "common/timeline.h"
#include "plan/planner.h"
#include "plan/simulator.h"
#include "trace/step_tracer.h"

namespace patrickstar::bind {

using ReleaseGil = pybind11::call_guard<pybind11::gil_scoped_release>;
using Address = uintptr_t;

template <class Element>
Element* pointer(Address address) {
  return reinterpret_cast<Element*>(address);
}

void register_build(pybind11::module_& module);
void register_errors(pybind11::module_& module);
void register_types(pybind11::module_& module);
void register_threads(pybind11::module_& module);
void register_checksum(pybind11::module_& module);
void register_optim(pybind11::module_& module);
// Optimizers without a variance (Lion, SGD): their enum, and their kernels for the submodule.
void register_momentum_rule(pybind11::module_& module);
void register_momentum_kernels(pybind11::module_& module);
void register_values_in_place(pybind11::module_& module);
void register_cuda_kernels(pybind11::module_& module);  // CUDA builds only
void register_loss_scaler(pybind11::module_& module);
void register_quant(pybind11::module_& module);
void register_plan(pybind11::module_& module);
void register_simulator(pybind11::module_& module);
void register_plan_vote(pybind11::module_& module);
void register_messages(pybind11::module_& module);
void register_collective(pybind11::module_& module);
void register_memory(pybind11::module_& module);
void register_disk(pybind11::module_& module);
void register_trace(pybind11::module_& module);
void register_observer(pybind11::module_& module);
void register_engine_options(pybind11::module_& module);
void register_runtime(pybind11::module_& module);
void register_gradient_hook(pybind11::module_& module);

// Conversions between C++ types and Python lists and dicts.
pybind11::list describe_timeline(const Timeline& timeline);
pybind11::dict describe_plan(const Plan& plan);
// A traced step; describe_stalls(): {"seconds", "stalled_seconds": {StallCause: seconds}}.
pybind11::dict describe_trace(const StepTrace& trace);
pybind11::dict describe_stalls(const StepTrace& trace);
// Arguments of make_plan, timeline aside.
pybind11::dict describe_problem(const PlanProblem& problem);
Timeline parse_timeline(const pybind11::list& accesses);
Plan parse_plan(const pybind11::dict& plan);
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
pybind11::dict describe_step(const SimulatedStep& step);

}  // namespace patrickstar::bind
