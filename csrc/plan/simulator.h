// The simulator: a pure function from a plan, the times of its moments and the machine's rates to the step that
// results.
//
// The plan's program (plan/program.h) is played on the queues that the runtime has (plan/clock.h). Several steps are
// played; the last ones, in which nothing changes from step to step any more, are what is reported.
//
// With several ranks it plays one of them, the others being as fast, and has two queues more: a chunk is gathered when
// this rank's shard is up (or cast, where the states are on the device), and compute waits for that; its gradient is
// scattered when it is complete, and its memory, its way down and its update wait for that. Uploads, downloads and
// updates are of shards then.
//
//   SimulatedStep step = simulate(problem, plan, rates, shape);
//   step.seconds, step.compute_seconds, step.stall_seconds[kOnUpload], ...
//
// Nothing here is shared; any thread may call it.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "plan/planner.h"
#include "plan/program.h"

namespace patrickstar {

// How fast a machine is. 0 of a duration: it takes no time.
struct Rates {
  double upload_gbps = 0;               // 1e9 bytes per second, host to device; must be more than 0
  double download_gbps = 0;             // device to host; must be more than 0
  double transfer_latency_seconds = 0;  // of each transfer, on top of its bytes
  // Of the others' shards of a chunk, (p - 1) / p of its bytes, at each of p ranks ("bus bandwidth"). 0: they take no
  // time.
  double gather_gbps = 0;
  double scatter_gbps = 0;
  double collective_latency_seconds = 0;   // of each gather and scatter, on top of its bytes
  double host_adam_params_per_second = 0;  // in one pass; must be more than 0
  // Of an update in one pass, what the two of [Note: parameters first] take: by the bytes that each moves, until they
  // were measured.
  double param_pass = 16.0 / 28;
  double states_pass = 26.0 / 28;
  double device_adam_params_per_second = 0;  // must be more than 0
  double device_memory_gbps = 0;  // of values that are dequantised, reads and writes; more than 0 where any are
  double disk_read_gbps = 0;   // of optimizer states, while others are written; more than 0 where any are on the disk
  double disk_write_gbps = 0;  // likewise
  double synchronize_seconds = 0;   // from the end of backward until the launching thread goes on: the norm is known
  double launch_ahead_seconds = 0;  // of device work that may be queued before the launching thread waits
};

// What the compute queue waited for (a measured step distinguishes more: StallCause, common/tracing.h).
enum Shortage : uint8_t {
  kOnUpload,      // a transfer to the device that was under way, or behind others
  kOnMemory,      // device memory: what held it was still in use, or still on its way to the host
  kOnHostUpdate,  // values that an update on the host was still making
  kOnLaunch,      // the launching thread, which had waited for the norm
  kOnCollective,  // a gather or scatter that was under way, or behind others
};
constexpr int kNumShortages = 5;

// Seconds in which one instruction kept its lane busy.
struct Busy {
  double begin = 0;
  double end = 0;
};

struct SimulatedStep {
  double seconds = 0;
  // How long each queue was busy: the roofline. The slowest queue alone would take as long.
  double compute_seconds = 0;
  double device_adam_seconds = 0;  // on the compute queue
  double upload_seconds = 0;
  double download_seconds = 0;
  double gather_seconds = 0;
  double scatter_seconds = 0;
  double host_adam_seconds = 0;
  double visit_seconds = 0;  // transfers of states that visit the device, the slower way of the two
  double disk_read_seconds = 0;
  double disk_write_seconds = 0;
  std::array<double, kNumShortages> stall_seconds{};  // of the compute queue
  int64_t uploaded_bytes = 0;
  int64_t downloaded_bytes = 0;
  int64_t gathered_bytes = 0;   // of other ranks' shards
  int64_t scattered_bytes = 0;  // to other ranks
  int64_t disk_read_bytes = 0;
  int64_t disk_written_bytes = 0;
  int64_t peak_bytes = 0;  // of the device: tide, states and payloads
};

// Throws ArgumentError when sizes do not agree or a rate is not positive.
SimulatedStep simulate(const PlanProblem& problem, const Plan& plan, const Rates& rates, const StepShape& shape);

// Throws ArgumentError where sizes do not agree or a rate is not positive.
void check_step(const PlanProblem& problem, const Rates& rates, const StepShape& shape);
// The step of a program that was compiled for a plan, its arguments being checked: several machines may play it.
SimulatedStep play(const PlanProblem& problem, const Program& program, const Rates& rates, const StepShape& shape);

// The program of the steady step, and by instruction when it is carried out, from the step's beginning on.
struct PlayedProgram {
  Program program;
  std::vector<Busy> spans;
  double seconds = 0;
};
PlayedProgram play_program(const PlanProblem& problem, const Plan& plan, const Rates& rates, const StepShape& shape);

}  // namespace patrickstar
