// What the ranks that hold one copy of the model together do with each other, and in which order.
//
//   gather    the whole compute values of a chunk, from all ranks' shards
//   scatter   the mean of all ranks' gradients of a chunk, of which each rank gets its shard
//   round     an exchange of short messages between the hosts
//
// Chunks that each rank has alone ([Note: ranks of a chunk], chunk/layout.h) are neither gathered nor scattered.
//
// [Note: the same order on every rank] Gathers run on one queue and one communicator, scatters on another; on each,
// every rank must enqueue the same ones in the same order. While a step replays its plan they are the plan's, which all
// ranks made from the same timeline ([Note: ranks in a plan], engine/rank_turns.h). Otherwise nobody knows what the
// others need, so they say it in rounds:
//
//   a rank that needs a chunk     says so, and which of its gradients are complete, again and again until it is served
//   a rank whose phase is over    says that, and goes on with rounds until all ranks' phases are over
//   in each round                 all ranks scatter the chunks that all have complete, and gather the needed one with
//                                 the least id, whether they need it themselves or not
//
// So a model may go otherwise on each rank, and no rank waits for one that does not come. A round costs a tenth of a
// millisecond and is needed without a plan only: in the first step, in evaluations, and in steps that leave their plan.
// With one rank nothing of this happens.
//
// What is decided here is done by engine/rank_turns.h. Guarded by the engine's lock.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "collective/communicator.h"
#include "common/fingerprint.h"
#include "common/timeline.h"
#include "common/types.h"

namespace patrickstar {

// How a forward of a plan went on one rank.
enum class ForwardEnd : uint8_t { kStays, kLeavesPlan };
// Where a rank is that exchanges which gradients it has.
enum class BackwardEnd : uint8_t {
  kComplete,
  kLeavesPlan,  // in the middle: it needs more than the plan gives
};

// What all ranks know at the end of a step.
struct StepAgreement {
  enum class Ways : uint8_t {
    kAlike,      // all ranks saw the same moments
    kAsPlanned,  // they did not, but all followed the step's plan to its end
    kApart,
  };
  Ways ways = Ways::kAlike;
  std::vector<std::string> notes;  // by rank: what it said beside its timeline
};

// What a rank says in a round, and in the exchange at the end of a step. Reading throws StateError for what is no such
// message; whose chunks, kinds and numbers fit is checked, so that nothing that another rank says can reach out of
// bounds.
struct ChunkRequest {
  static constexpr ChunkId kPhaseOver = -1;

  ChunkId needed = kPhaseOver;
  std::vector<ChunkId> complete;  // gradients that are complete here and not scattered yet
};
std::string packed(const ChunkRequest& request);
ChunkRequest unpacked_request(const std::string& message, int num_chunks);

struct StepSummary {
  uint64_t fingerprint = 0;            // of the sequence of moments
  std::vector<int64_t> tides;          // by moment, bytes
  bool follows_plan = false;           // to the step's end
  std::vector<int64_t> planned_tides;  // by planned moment, where it does
  std::string note;
};
std::string packed(const StepSummary& summary);
StepSummary unpacked_summary(const std::string& message);

// What is to be done after a round, by all ranks alike.
struct RankRound {
  static constexpr ChunkId kNone = -1;

  std::vector<ChunkId> complete;  // on all ranks: to be scattered, in this order
  ChunkId needed = kNone;         // then to be gathered; none when all ranks' phases are over
};

class Collectives {
 public:
  // One rank.
  Collectives();
  Collectives(std::shared_ptr<Communicator> gather, std::shared_ptr<Communicator> scatter,
              std::shared_ptr<ControlGroup> control);

  int num_ranks() const { return num_ranks_; }
  // Any thread. What runs with other ranks ends with RankFailure, and nothing of it can be used any more.
  void abort();
  Communicator& gather_group() { return *gather_group_; }
  Communicator& scatter_group() { return *scatter_group_; }

  // One round. All ranks must be here.
  RankRound negotiate(const ChunkRequest& mine, int num_chunks);

  // Whenever a plan was made, with its fingerprint (plan/planner.h): ranks with different ones would wait for each
  // other, or gather what does not belong together. Throws StateError, on every rank, when they have. One exchange.
  void check_same_plan(uint64_t fingerprint);

  // By rank. All ranks must be here ([Note: ranks at the same point]).
  std::vector<std::string> exchange(const std::string& what, const std::string& mine);
  int64_t max_over_ranks(int64_t mine);
  // [Note: scatters are counted] This rank enqueues a scatter of this chunk's gradients. Ranks that enqueue others than
  // each other would add up what does not belong together, and wait for those that do not come.
  void note_scatter(ChunkId chunk);
  // Whether all ranks stay in the plan after a forward. One exchange.
  bool all_stay(ForwardEnd mine);
  // Bit by bit, where all ranks' backwards are complete; else false, and flags are as they were. Where ranks noted
  // other scatters than each other, ends these and throws RankMismatch on every rank. One exchange.
  bool any_over_ranks(std::vector<uint8_t>& flags, BackwardEnd mine);
  // The tides of `timeline` become the highest of all ranks, moment by moment where these saw the same moments; so do
  // `planned_tides` (null: this rank has left the plan) where all followed the plan. One exchange, which takes a note
  // of each rank to all others.
  StepAgreement agree_on(Timeline& timeline, std::vector<int64_t>* planned_tides, const std::string& note = {});

 private:
  int num_ranks_ = 1;
  std::shared_ptr<Communicator> gather_group_;
  std::shared_ptr<Communicator> scatter_group_;
  std::shared_ptr<ControlGroup> control_;
  int64_t num_scatters_ = 0;  // so far
  Fingerprint scatters_;      // which, in their order
};

}  // namespace patrickstar
