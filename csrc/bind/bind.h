// One register_* per concept; module.cpp calls them and does nothing else.
#pragma once

#include <pybind11/pybind11.h>

#include "common/timeline.h"
#include "plan/planner.h"
#include "trace/step_tracer.h"

namespace patrickstar::bind {

void register_build(pybind11::module_& module);
void register_errors(pybind11::module_& module);
void register_types(pybind11::module_& module);
void register_optim(pybind11::module_& module);
void register_plan(pybind11::module_& module);
void register_collective(pybind11::module_& module);
void register_memory(pybind11::module_& module);
void register_trace(pybind11::module_& module);
void register_runtime(pybind11::module_& module);

// The planner's types as Python lists and dicts.
pybind11::list describe_timeline(const Timeline& timeline);
pybind11::dict describe_plan(const Plan& plan);
// A traced step likewise.
pybind11::dict describe_trace(const StepTrace& trace);

}  // namespace patrickstar::bind
