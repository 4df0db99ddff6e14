// The simulator: a pure function from a plan, compute times and machine rates to a steady step.
//
// The plan's program (plan/program.h) is played on the runtime's queues (plan/clock.h), step after step until nothing
// changes; the last steps are reported.
//
// With several ranks it plays one rank and assumes the others equally fast. An all-gather starts when this rank's shard
// is uploaded (or cast, if its states are on the device), and compute waits for it. A reduce-scatter starts when the
// gradient is complete; freeing, download and update wait for it. Uploads, downloads and updates move shards.
//
//   SimulatedStep step = simulate(problem, plan, rates, shape);
//   step.seconds, step.compute_seconds, step.stall_seconds[kOnUpload], ...
//
// No shared state; any thread may call it.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "plan/planner.h"
#include "plan/program.h"

namespace patrickstar {

// Machine rates. A duration of 0 takes no time.
struct Rates {
  double upload_gbps = 0;               // host to device, 1e9 bytes/s; must be > 0
  double download_gbps = 0;             // device to host; must be > 0
  double transfer_latency_seconds = 0;  // per transfer, on top of its bytes
  // Bus bandwidth: (p - 1) / p of a chunk's bytes, at each of p ranks. 0: takes no time.
  double gather_gbps = 0;
  double scatter_gbps = 0;
  double collective_latency_seconds = 0;   // per collective, on top of its bytes
  double host_adam_params_per_second = 0;  // in one pass; must be > 0
  // Duration of phase one and two of a two-phase update (engine/update_jobs.h), relative to one pass. The defaults are
  // ratios of bytes moved; measured_rates() replaces them.
  double param_pass = 16.0 / 28;
  double states_pass = 26.0 / 28;
  double device_adam_params_per_second = 0;  // must be > 0
  double device_memory_gbps = 0;    // dequantisation, reads plus writes; must be > 0 if any value is dequantised
  double disk_read_gbps = 0;        // optimizer states, while others are written; must be > 0 if any are on the disk
  double disk_write_gbps = 0;       // likewise, while others are read
  double synchronize_seconds = 0;   // from the end of backward until the launching thread knows the norm
  double launch_ahead_seconds = 0;  // device work that may be queued before the launching thread waits
};

// Causes of stalls of the compute queue. Measured steps distinguish more causes: StallCause, common/tracing.h.
enum Shortage : uint8_t {
  kOnUpload,      // an upload in progress, or queued behind others
  kOnMemory,      // device memory still in use, or still being downloaded
  kOnHostUpdate,  // a host update that still makes the value
  kOnLaunch,      // the launching thread, which had waited for the norm
  kOnCollective,  // an all-gather or reduce-scatter in progress, or queued behind others
};
constexpr int kNumShortages = 5;

// Seconds since the start of the simulation during which one instruction occupied its lane.
struct Busy {
  double begin = 0;
  double end = 0;
};

struct SimulatedStep {
  double seconds = 0;
  // Busy time of each queue (roofline).
  double compute_seconds = 0;
  double device_adam_seconds = 0;  // on the compute queue
  double upload_seconds = 0;
  double download_seconds = 0;
  double gather_seconds = 0;
  double scatter_seconds = 0;
  double host_adam_seconds = 0;
  double round_trip_seconds = 0;  // transfers of round trips, the slower direction
  double disk_read_seconds = 0;
  double disk_write_seconds = 0;
  std::array<double, kNumShortages> stall_seconds{};  // of the compute queue
  int64_t uploaded_bytes = 0;
  int64_t downloaded_bytes = 0;
  int64_t gathered_bytes = 0;   // from other ranks
  int64_t scattered_bytes = 0;  // to other ranks
  int64_t disk_read_bytes = 0;
  int64_t disk_written_bytes = 0;
  int64_t peak_bytes = 0;  // device: activation memory, states and other chunk buffers
};

// Throws ArgumentError as check_step() does, or if plan and timeline differ in length.
SimulatedStep simulate(const PlanProblem& problem, const Plan& plan, const Rates& rates, const StepShape& shape);

// Throws ArgumentError if sizes disagree or a rate is not positive.
void check_step(const PlanProblem& problem, const Rates& rates, const StepShape& shape);
// Plays a compiled program; arguments must have passed check_step(). Different rates may play the same program.
SimulatedStep play(const PlanProblem& problem, const Program& program, const Rates& rates, const StepShape& shape);

// The steady step's program. spans: by instruction, relative to the step's beginning.
struct PlayedProgram {
  Program program;
  std::vector<Busy> spans;
  double seconds = 0;
};
PlayedProgram play_program(const PlanProblem& problem, const Plan& plan, const Rates& rates, const StepShape& shape);

}  // namespace patrickstar
