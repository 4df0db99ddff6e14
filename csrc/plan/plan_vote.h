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

struct PlanVote {
  bool can_measure = false;     // the next step may be traced here, or one already was
  bool has_plan = false;        // the last step replayed a plan, or could have
  std::vector<Recipe> updates;  // by chunk, the earliest that fit memory
  // From a traced step that took the plan's path; `shape` has compute_seconds and activations only.
  std::optional<StepTimes> times;
};

std::string packed(const PlanVote& vote);
// Throws StateError for a message that is not a vote over `num_chunks` chunks.
PlanVote unpacked_vote(const std::string& message, size_t num_chunks);

// - can_measure, has_plan: true if true on all ranks.
// - updates: by chunk the latest recipe on any rank. Device recipes come last, since memory is reserved for them.
// - times, of the ranks that made the most accesses: lowest rates, longest waits, and by access longest compute and
//   most activations. The other ranks left accesses out.
//
// Collective rates are the fastest rank's: it came last, and the other ranks' times include waiting for it.
PlanVote agreed(const std::vector<PlanVote>& votes);

}  // namespace patrickstar
