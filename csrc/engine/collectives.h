// Collective operations of the ranks that hold one copy of the model together, and their order.
//
//   all-gather       whole compute values of a chunk, from all ranks' shards
//   reduce-scatter   the mean of all ranks' gradients of a chunk; each rank gets its shard
//   round            an exchange of short messages between hosts
//
// The ranks are those that share the chunk (chunk/layout.h). A chunk of one rank alone takes part in neither.
//
// [Note: the same order on every rank] All-gathers use one queue and one communicator, reduce-scatters another. On
// each, every rank must enqueue the same operations in the same order. While a step replays its plan, the plan gives
// the order: all ranks made it from the same timeline ([Note: ranks in a plan], engine/rank_turns.h). Without a plan,
// ranks agree in rounds:
//
//   a rank that needs a chunk     sends its id, and the chunks with complete gradients, until the all-gather
//   a rank whose phase is over    sends kPhaseOver, and continues until all ranks' phases are over
//   in each round                 all ranks reduce-scatter the chunks that are complete everywhere, then all-gather
//                                 the needed chunk with the lowest id
//
// So ranks may diverge without deadlock. A round takes 0.1 ms (docs/log.md). Rounds occur in the first step, in
// evaluations, and after a plan miss. One rank alone does none of this.
//
// RankTurns (engine/rank_turns.h) carries out these decisions. Guarded by the engine's lock.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "chunk/layout.h"
#include "collective/communicator.h"
#include "common/fingerprint.h"
#include "common/timeline.h"
#include "common/types.h"

namespace patrickstar {

enum class ForwardEnd : uint8_t { kStays, kLeavesPlan };
// Position of a rank in its backward when it exchanges its gradient flags.
enum class BackwardEnd : uint8_t {
  kComplete,
  kLeavesPlan,  // in the middle of backward: the rank needs more than the plan gives
};

struct StepAgreement {
  enum class Ways : uint8_t {
    kAlike,      // all ranks saw the same accesses
    kAsPlanned,  // accesses differ, but every rank followed the plan to its end
    kApart,      // ranks diverged from the plan
  };
  Ways ways = Ways::kAlike;
  std::vector<std::string> notes;  // by rank: StepSummary::note
};

// Messages of a round and of the end of a step. Unpacking throws StateError for a malformed message; chunk ids, kinds
// and numbers are range-checked, so that no message can cause access out of bounds.
struct ChunkRequest {
  static constexpr ChunkId kPhaseOver = -1;

  ChunkId needed = kPhaseOver;
  std::vector<ChunkId> complete;  // chunks with complete gradients that are not reduce-scattered yet
};
std::string packed(const ChunkRequest& request);
ChunkRequest unpacked_request(const std::string& message, int num_chunks);

struct StepSummary {
  uint64_t fingerprint = 0;                        // of the sequence of accesses
  std::vector<int64_t> activation_levels;          // peak activation memory by access, bytes
  bool follows_plan = false;                       // to the end of the step
  std::vector<int64_t> planned_activation_levels;  // by planned access; empty if this rank left the plan
  std::string note;
};
std::string packed(const StepSummary& summary);
StepSummary unpacked_summary(const std::string& message);

// Result of a round, the same on all ranks.
struct RankRound {
  static constexpr ChunkId kNone = -1;

  std::vector<ChunkId> complete;  // reduce-scattered by all ranks, in this order
  ChunkId needed = kNone;         // all-gathered next; kNone when all ranks' phases are over
};

class Collectives : public std::enable_shared_from_this<Collectives> {
 public:
  Collectives();
  // `part_gather`, `part_scatter`: of the ranks with the same parts of parameters (ChunkRanks); null: there are none,
  // or one rank has each part.
  Collectives(std::shared_ptr<Communicator> gather, std::shared_ptr<Communicator> scatter,
              std::shared_ptr<ControlGroup> control, std::shared_ptr<Communicator> part_gather = nullptr,
              std::shared_ptr<Communicator> part_scatter = nullptr);

  int num_ranks() const { return num_ranks_; }
  // Callable from any thread. Running operations with other ranks end with RankFailure; nothing here works afterwards.
  void abort();
  // Throws ArgumentError unless there are communicators of the ranks that share each chunk.
  void check_layout(const Layout& layout) const;
  // Communicators of the ranks that share a chunk.
  Communicator& gather_group(const Sharding& sharding) { return group_of(sharding, gather_group_, part_gather_); }
  Communicator& scatter_group(const Sharding& sharding) { return group_of(sharding, scatter_group_, part_scatter_); }

  // One round; all ranks must call it.
  RankRound negotiate(const ChunkRequest& mine, int num_chunks);

  // Exchanges the fingerprint of a new plan (plan/planner.h). Ranks with different plans would deadlock or mix up
  // chunks, so each of them throws StateError. One exchange.
  void check_same_plan(uint64_t fingerprint);

  // Messages by rank. All ranks must call it at the same point (collective/communicator.h).
  std::vector<std::string> exchange(const std::string& what, const std::string& mine);
  // Messages of the ranks that share a chunk, by shard. All ranks must call it at the same point.
  std::vector<std::string> exchange_shards(const std::string& what, const std::string& mine, const Sharding& sharding);
  int64_t max_over_ranks(int64_t mine);
  // Counts a reduce-scatter of this chunk that this rank enqueues. any_over_ranks() compares the sequences: ranks with
  // different ones would add up unrelated gradients, or deadlock.
  void note_scatter(ChunkId chunk);
  // True if all ranks stay in the plan after a forward. One exchange.
  bool all_stay(ForwardEnd mine);
  // ORs `flags` over ranks if every rank's backward is complete; otherwise returns false and leaves `flags`. If the
  // ranks' note_scatter() sequences differ, aborts the reduce-scatters and throws RankMismatch on every rank. One
  // exchange.
  bool any_over_ranks(std::vector<uint8_t>& flags, BackwardEnd mine);
  // Raises the activation memory of each access in `timeline` to the maximum over ranks. If accesses differ between
  // ranks, all get the overall maximum. Raises `planned_activation_levels` as well (null: this rank left the plan), if
  // all ranks followed the plan. Distributes each rank's note. One exchange.
  StepAgreement agree_on(Timeline& timeline, std::vector<int64_t>* planned_activation_levels,
                         const std::string& note = {});
  // All ranks' accesses in one timeline (plan/timeline_merge.h). One exchange.
  Timeline merge(const Timeline& mine, int num_chunks);

 private:
  Communicator& group_of(const Sharding& sharding, const std::shared_ptr<Communicator>& of_all,
                         const std::shared_ptr<Communicator>& of_part) {
    return sharding.num_ranks == num_ranks_ ? *of_all : *of_part;
  }

  int num_ranks_ = 1;
  std::shared_ptr<Communicator> gather_group_;
  std::shared_ptr<Communicator> scatter_group_;
  std::shared_ptr<Communicator> part_gather_;  // null: see the constructor
  std::shared_ptr<Communicator> part_scatter_;
  std::shared_ptr<ControlGroup> control_;
  int64_t num_scatters_ = 0;  // since the start
  Fingerprint scatters_;      // chunks of note_scatter(), in order
};

}  // namespace patrickstar
