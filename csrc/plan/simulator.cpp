#include "plan/simulator.h"

#include <algorithm>
#include <cmath>

#include "common/check.h"
#include "plan/chunk_bytes.h"
#include "plan/clock.h"

namespace patrickstar {

namespace {

// Most steps played; the last half is averaged. Host updates, if they are slowest, fall behind step by step until they
// reach a steady state. Playing stops when two steps end in the same state. Not measured.
constexpr int kSteps = 16;
constexpr double kSameSeconds = 1e-9;

bool are_same(const std::vector<double>& before, const std::vector<double>& now) {
  return std::equal(before.begin(), before.end(), now.begin(), now.end(),
                    [](double a, double b) { return std::abs(a - b) < kSameSeconds; });
}

void check_plan(const PlanProblem& problem, const Plan& plan) {
  const size_t num_accesses = problem.timeline->accesses.size();
  PS_CHECK(plan.accesses.size() == num_accesses, ArgumentError, "the timeline has ", num_accesses,
           " accesses and the plan ", plan.accesses.size(), "; give one of each per access");
}

SimulatedStep play_until_steady(Clock& clock) {
  SimulatedStep mean;
  double begin = 0;
  std::vector<double> before;
  for (int index = 0; index < kSteps; ++index) {
    if (index == kSteps / 2) begin = clock.step_end();
    SimulatedStep step = clock.play_step();
    const std::vector<double> now = clock.under_way();
    if (are_same(before, now)) {
      step.seconds = clock.step_end() - clock.step_begin();
      return step;
    }
    before = now;
    if (index < kSteps / 2) continue;
    std::array<double, kNumShortages> stalls = mean.stall_seconds;
    for (size_t cause = 0; cause < stalls.size(); ++cause) stalls[cause] += step.stall_seconds[cause] / (kSteps / 2);
    const int64_t peak_bytes = std::max(mean.peak_bytes, step.peak_bytes);
    mean = step;
    mean.stall_seconds = stalls;
    mean.peak_bytes = peak_bytes;
  }
  mean.seconds = (clock.step_end() - begin) / (kSteps / 2);
  return mean;
}

}  // namespace

void describe_updates(const Layout& layout, StepShape& shape) {
  shape.num_ranks = layout.num_ranks();
  shape.numels.clear();
  shape.disk_bytes.clear();
  shape.chunk_ranks.clear();
  for (const ChunkSpec& chunk : layout.chunks()) {
    shape.numels.push_back(chunk.shard_numel);
    shape.disk_bytes.push_back(disk_bytes(chunk));
    shape.chunk_ranks.push_back(chunk.sharding.num_ranks);
  }
}

void check_step(const PlanProblem& problem, const Rates& rates, const StepShape& shape) {
  const size_t num_accesses = problem.timeline->accesses.size();
  PS_CHECK(shape.compute_seconds.size() == num_accesses, ArgumentError, "the timeline has ", num_accesses,
           " accesses and the times ", shape.compute_seconds.size(), "; give one of each per access");
  PS_CHECK(shape.activations.empty() || shape.activations.size() == num_accesses, ArgumentError, "the timeline has ",
           num_accesses, " accesses and activations are copied in ", shape.activations.size(),
           "; give one of each per access");
  PS_CHECK(
      shape.updates.size() == shape.numels.size() && shape.updates.size() * kNumArrayKinds == problem.arrays.size(),
      ArgumentError, shape.updates.size(), " updates and ", shape.numels.size(), " sizes for ",
      problem.arrays.size() / kNumArrayKinds, " chunks; give one of each per chunk");
  PS_CHECK(shape.chunk_ranks.empty() || shape.chunk_ranks.size() == shape.updates.size(), ArgumentError,
           "ranks that share a chunk are known of ", shape.chunk_ranks.size(), " chunks of ", shape.updates.size(),
           "; give those of each chunk, or none");
  PS_CHECK(!any_round_trips(shape.updates) || problem.round_trips.size() == shape.updates.size(), ArgumentError,
           "updates are GPU round trips, and their bytes are given for ", problem.round_trips.size(), " of ",
           shape.updates.size(), " chunks; give one entry per chunk");
  PS_CHECK(rates.upload_gbps > 0 && rates.download_gbps > 0 && rates.host_adam_params_per_second > 0 &&
               rates.device_adam_params_per_second > 0,
           ArgumentError, "a rate is not positive: upload ", rates.upload_gbps, " GB/s, download ", rates.download_gbps,
           " GB/s, Adam ", rates.host_adam_params_per_second, " (host) and ", rates.device_adam_params_per_second,
           " (device) parameters per second");
  PS_CHECK(rates.param_pass > 0 && rates.states_pass > 0, ArgumentError, "passes over parameters and over states take ",
           rates.param_pass, " and ", rates.states_pass, " of an update in one pass; give more than 0");
  const bool any_on_disk = std::any_of(shape.updates.begin(), shape.updates.end(),
                                       [](Recipe recipe) { return row_of(recipe).states == Tier::kDisk; });
  PS_CHECK(!any_on_disk || (shape.disk_bytes.size() == shape.updates.size() && rates.disk_read_gbps > 0 &&
                            rates.disk_write_gbps > 0),
           ArgumentError, "states are on the disk, which reads ", rates.disk_read_gbps, " GB/s and writes ",
           rates.disk_write_gbps, " GB/s, and their bytes are known of ", shape.disk_bytes.size(),
           " chunks; give positive rates and the bytes of each chunk");
  const bool any_quantized = std::any_of(shape.dequantized_bytes.begin(), shape.dequantized_bytes.end(),
                                         [](int64_t num_bytes) { return num_bytes > 0; });
  PS_CHECK(shape.dequantized_bytes.empty() || shape.dequantized_bytes.size() == shape.updates.size(), ArgumentError,
           "bytes that are dequantised are known of ", shape.dequantized_bytes.size(), " chunks of ",
           shape.updates.size(), "; give those of each chunk, or none");
  PS_CHECK(!any_quantized || rates.device_memory_gbps > 0, ArgumentError,
           "chunks are dequantised by memory that moves ", rates.device_memory_gbps, " GB/s; give a positive rate");
  PS_CHECK(shape.num_ranks >= 1 && rates.gather_gbps >= 0 && rates.scatter_gbps >= 0, ArgumentError, "gathers at ",
           rates.gather_gbps, " GB/s and scatters at ", rates.scatter_gbps, " GB/s between ", shape.num_ranks,
           " ranks: give at least one rank and no negative rate");
}

SimulatedStep simulate(const PlanProblem& problem, const Plan& plan, const Rates& rates, const StepShape& shape) {
  check_step(problem, rates, shape);
  check_plan(problem, plan);
  return play(problem, compile(problem, plan, shape), rates, shape);
}

SimulatedStep play(const PlanProblem& problem, const Program& program, const Rates& rates, const StepShape& shape) {
  Clock clock(problem, program, rates, shape);
  return play_until_steady(clock);
}

PlayedProgram play_program(const PlanProblem& problem, const Plan& plan, const Rates& rates, const StepShape& shape) {
  check_step(problem, rates, shape);
  check_plan(problem, plan);
  PlayedProgram played;
  played.program = compile(problem, plan, shape);
  Clock clock(problem, played.program, rates, shape);
  played.seconds = play_until_steady(clock).seconds;
  for (const Busy& span : clock.spans())
    played.spans.push_back({span.begin - clock.step_begin(), span.end - clock.step_begin()});
  return played;
}

}  // namespace patrickstar
