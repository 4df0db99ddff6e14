// Rates and times for the simulator, measured from a traced step. Pure functions of the trace.
//
//   StepTimes times;
//   times.rates = measured_rates(trace);
//   times.shape.compute_seconds = measured_compute_seconds(trace);
#pragma once

#include <vector>

#include "plan/simulator.h"
#include "trace/step_tracer.h"

namespace patrickstar {

// Lanes that the step did not use get a rate so high that it does not matter.
// - Transfers: median rate of the large ones, latency included. Collectives: the same, by bytes from other ranks.
// - Adam: parameters per second in one pass, and each phase of a two-phase update relative to it.
// - synchronize_seconds: optimizer time that is neither an update nor a simulated stall, plus the time from the step's
//   beginning to its first access. A step without transfers is thus predicted as long as it was.
Rates measured_rates(const StepTrace& trace);

// By access: duration less simulated stalls. Host work of the calling thread counts as compute.
std::vector<double> measured_compute_seconds(const StepTrace& trace);

}  // namespace patrickstar
