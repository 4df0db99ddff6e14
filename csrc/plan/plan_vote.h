// Votes: what the next plan follows from beside the timeline, as each rank sees it, and what all ranks make of that.
//
// [Note: one plan on all ranks] Ranks gather in the order of their plans, so all must make the same one, and nothing
// that a rank alone has seen may enter it: neither how long its own step took, nor which of its updates found memory to
// start early, nor what its allocator's fragments take, nor whether it can be traced now. Each puts that into a vote,
// votes travel with the exchange that every step ends with (Collectives::agree_on), and plans are made from what
// agreed() says: the slowest of all ranks, since a step of all is as long as the slowest one's. One rank agrees with
// itself.
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

// What a step's measurement gave, and what the simulator takes beside a plan.
struct StepTimes {
  Rates rates;
  StepShape shape;
};

struct PlanVote {
  bool can_measure = false;     // the next step may be traced here, or was already
  bool has_plan = false;        // that the last step replayed, or could have
  std::vector<Recipe> updates;  // by chunk, the earliest that there is memory for
  // Of the device, beside the tide; none where that was not seen yet ([Note: fragments], backend/cuda_pressure.cpp).
  std::optional<int64_t> fragment_bytes;
  // Of a traced step, until all ranks have them; `shape` says compute_seconds and activations.
  std::optional<StepTimes> times;
};

std::string packed(const PlanVote& vote);
// Of a rank with so many chunks. Throws StateError for what is no such message.
PlanVote unpacked_vote(const std::string& message, size_t num_chunks);

// can_measure, has_plan: all. updates: by chunk the latest on any rank; on the device if they are there on any, since
// memory is set aside for that. fragment_bytes: the most, where all have seen theirs. times: where all ranks have some,
// the lowest rates, the longest waits and by moment the longest compute and most activations. Gathers and scatters are
// as fast as the rank says for which they were fastest: it came last, and the others' times count how long they waited
// for it.
PlanVote agreed(const std::vector<PlanVote>& votes);

}  // namespace patrickstar
