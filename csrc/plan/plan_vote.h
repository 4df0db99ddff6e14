// Votes: what each rank saw of a step, and the common values that all ranks plan with.
//
// Ranks all-gather in the order of their plans, so all ranks must make the same plan. Nothing that a single rank saw
// may enter a plan: step times, memory found for speculative updates, whether the step can be traced. Each rank puts
// these into a vote. Votes travel with the exchange that ends every step (Collectives::agree_on), and plans use
// agreed(): the slowest rank, since the step of all ranks is as long as the slowest one's.
//
//   std::string message = packed(vote);
//   PlanVote all = agreed({unpacked_vote(messages[0], num_chunks), unpacked_vote(messages[1], num_chunks)});
//
// Pure functions; any thread may call them.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "plan/simulator.h"

namespace patrickstar {

// Inputs of the simulator, beside a plan, from a measured step.
struct StepTimes {
  Rates rates;
  StepShape shape;
};

std::string packed(const StepTimes& times);
// Throws StateError for a message that is not of times over `num_chunks` chunks.
StepTimes unpacked_times(const std::string& message, size_t num_chunks);
// Times of the slowest rank, as in agreed(). None if ranks have other numbers of accesses.
std::optional<StepTimes> slowest(const std::vector<StepTimes>& by_rank);
// The faster rates and shorter times of two measurements, since disturbances only add time; the later one if their
// accesses differ in number. The later one alone predicted steps of 8 B 4 to 14 % too long
// (benchmark/results/h200-first-steps.txt).
StepTimes undisturbed(const StepTimes& earlier, StepTimes later);

struct PlanVote {
  bool can_measure = false;     // the next step may be traced here, or one already was
  bool has_plan = false;        // the last step replayed a plan, or could have
  std::vector<Recipe> updates;  // by chunk, the earliest that fit memory
  bool awaits_trace = false;    // of a step that was to be traced, which a user's trace has put off
  int64_t timed_path = 0;       // path of the step with these times
  // From a traced step; `shape` has compute_seconds and activations only.
  std::optional<StepTimes> times;
};

std::string packed(const PlanVote& vote);
// Throws StateError for a message that is not a vote over `num_chunks` chunks.
PlanVote unpacked_vote(const std::string& message, size_t num_chunks);

// - can_measure, has_plan: true if true on all ranks.
// - updates: by chunk the latest recipe on any rank. Device recipes come last, since memory is reserved for them.
// - awaits_trace: true if true on any rank; there are no times then.
// - times: lowest rates, longest waits, and by access longest compute and most activations. Ranks that left accesses
//   out have none. None if ranks timed different paths.
//
// Collective rates are the fastest rank's: it came last, and the other ranks' times include waiting for it.
PlanVote agreed(const std::vector<PlanVote>& votes);

}  // namespace patrickstar
