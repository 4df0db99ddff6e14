// What a traced step says about the machine: the rates and times that the simulator takes. Pure functions of the trace.
//
//   StepTimes times;
//   times.rates = measured_rates(trace);
//   times.shape.compute_seconds = measured_compute_seconds(trace);
#pragma once

#include <vector>

#include "plan/simulator.h"
#include "trace/step_tracer.h"

namespace patrickstar {

// A rate that the step did not show is so high that it does not matter. Transfers: the median of the large ones while
// they ran, latency included; collectives likewise, by the bytes that came from other ranks. Adam: parameters over
// seconds, of updates in one pass and of either of two passes by themselves. synchronize_seconds: what of the
// optimizer's step was neither an update nor a wait that the simulator knows, and from the beginning of the step until
// its first moment; so that a step without transfers is predicted as long as it was.
Rates measured_rates(const StepTrace& trace);

// By moment: its time but for the waits that the simulator knows. Work of the calling thread in host memory counts.
std::vector<double> measured_compute_seconds(const StepTrace& trace);

}  // namespace patrickstar
