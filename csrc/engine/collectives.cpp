#include "engine/collectives.h"

#include <algorithm>
#include <iomanip>
#include <map>
#include <set>
#include <sstream>
#include <utility>

#include "collective/message.h"
#include "common/check.h"
#include "common/fingerprint.h"
#include "plan/timeline_merge.h"

namespace patrickstar {

namespace {

// Equal for equal sequences of accesses.
uint64_t fingerprint(const Timeline& timeline) {
  Fingerprint result;
  for (const Access& access : timeline.accesses) {
    result.add(static_cast<int64_t>(access.phase));
    result.add(static_cast<int64_t>(access.acquired.size()));
    for (ArrayId id : access.acquired) result.add(id.index());
    result.add(static_cast<int64_t>(access.uses.size()));
    for (const ArrayUse& use : access.uses) {
      result.add(use.array.index() * 4 + static_cast<int64_t>(use.mode));
    }
  }
  return result.value();
}

std::vector<int64_t> activation_levels_of(const Timeline& timeline) {
  std::vector<int64_t> activation_levels;
  for (const Access& access : timeline.accesses) activation_levels.push_back(access.activation_peak_bytes);
  return activation_levels;
}

std::string hexadecimal(uint64_t value) {
  std::ostringstream text;
  text << std::hex << std::setw(16) << std::setfill('0') << value;
  return text.str();
}

}  // namespace

std::string packed(const ChunkRequest& request) {
  return MessageWriter().add(request.needed).add(request.complete).str();
}

ChunkRequest unpacked_request(const std::string& message, int num_chunks) {
  MessageReader reader(message, "which chunks are needed");
  ChunkRequest request;
  request.needed = reader.next<ChunkId>();
  request.complete = reader.next_list<ChunkId>();
  reader.finish();
  reader.check(request.needed >= ChunkRequest::kPhaseOver && request.needed < num_chunks, "a chunk that is not there");
  std::set<ChunkId> seen;
  for (ChunkId chunk : request.complete) {
    reader.check(chunk >= 0 && chunk < num_chunks, "a chunk that is not there");
    reader.check(seen.insert(chunk).second, "a chunk that is complete twice");
  }
  return request;
}

std::string packed(const StepSummary& summary) {
  return MessageWriter()
      .add(summary.fingerprint)
      .add(summary.activation_levels)
      .add(static_cast<uint8_t>(summary.follows_plan))
      .add(summary.planned_activation_levels)
      .add(summary.note)
      .str();
}

StepSummary unpacked_summary(const std::string& message) {
  MessageReader reader(message, "how the step went");
  StepSummary summary;
  summary.fingerprint = reader.next<uint64_t>();
  summary.activation_levels = reader.next_list<int64_t>();
  const auto follows = reader.next<uint8_t>();
  summary.planned_activation_levels = reader.next_list<int64_t>();
  summary.note = reader.next_text();
  reader.finish();
  reader.check(follows <= 1, "no truth value");
  summary.follows_plan = follows == 1;
  for (int64_t activation_memory : summary.activation_levels)
    reader.check(activation_memory >= 0, "activation memory below 0");
  for (int64_t activation_memory : summary.planned_activation_levels)
    reader.check(activation_memory >= 0, "activation memory below 0");
  return summary;
}

Collectives::Collectives() = default;

Collectives::Collectives(std::shared_ptr<Communicator> gather, std::shared_ptr<Communicator> scatter,
                         std::shared_ptr<ControlGroup> control, std::shared_ptr<Communicator> part_gather,
                         std::shared_ptr<Communicator> part_scatter)
    : num_ranks_(control->size()),
      gather_group_(std::move(gather)),
      scatter_group_(std::move(scatter)),
      part_gather_(std::move(part_gather)),
      part_scatter_(std::move(part_scatter)),
      control_(std::move(control)) {}

void Collectives::check_layout(const Layout& layout) const {
  PS_CHECK(layout.num_ranks() == num_ranks_, ArgumentError, "the layout is for ", layout.num_ranks(),
           " ranks, there are ", num_ranks_);
  for (const ChunkSpec& chunk : layout.chunks()) {
    const Sharding& sharding = chunk.sharding;
    if (sharding.num_ranks == 1 || sharding.num_ranks == num_ranks_) continue;
    for (const std::shared_ptr<Communicator>& group : {part_gather_, part_scatter_}) {
      PS_CHECK(group != nullptr && group->size() == sharding.num_ranks && group->rank() == sharding.rank, ArgumentError,
               "a chunk is shared by ", sharding.num_ranks, " of ", num_ranks_,
               " ranks, of which there is no communicator; give part_gather and part_scatter");
    }
  }
}

void Collectives::abort() {
  if (num_ranks_ == 1) return;
  control_->abort();
  for (const auto& group : {gather_group_, scatter_group_, part_gather_, part_scatter_}) {
    if (group != nullptr) group->abort();
  }
}

RankRound Collectives::negotiate(const ChunkRequest& mine, int num_chunks) {
  std::map<ChunkId, int> num_complete;
  std::set<ChunkId> wanted;
  for (const std::string& message : exchange("which chunks are needed", packed(mine))) {
    const ChunkRequest request = unpacked_request(message, num_chunks);
    if (request.needed != ChunkRequest::kPhaseOver) wanted.insert(request.needed);
    for (ChunkId chunk : request.complete) ++num_complete[chunk];
  }
  RankRound round;
  for (const auto& [chunk, count] : num_complete) {
    if (count == num_ranks_) round.complete.push_back(chunk);
  }
  if (!wanted.empty()) round.needed = *wanted.begin();
  return round;
}

std::vector<std::string> Collectives::exchange(const std::string& what, const std::string& mine) {
  if (control_ == nullptr) return {mine};
  return control_->exchange(what, mine);
}

void Collectives::check_same_plan(uint64_t fingerprint) {
  const std::string mine = hexadecimal(fingerprint);
  const std::vector<std::string> all = exchange("the plan's fingerprint", mine);
  if (std::all_of(all.begin(), all.end(), [&](const std::string& theirs) { return theirs == all.front(); })) return;
  std::string who;
  for (size_t rank = 0; rank < all.size(); ++rank) {
    who += (rank == 0 ? "rank " : ", rank ") + std::to_string(rank) + " has " + all[rank];
  }
  PS_CHECK(false, StateError, "the ranks came to have different plans (", who,
           ") and would gather in different orders; run the same version of PatrickStar on all ranks, and report this");
}

std::vector<std::string> Collectives::exchange_shards(const std::string& what, const std::string& mine,
                                                      const Sharding& sharding) {
  const std::vector<std::string> messages = exchange(what, mine);
  const int num_parts = num_ranks_ / sharding.num_ranks;
  std::vector<std::string> found;
  for (int rank = control_->rank() % num_parts; rank < num_ranks_; rank += num_parts) {
    found.push_back(messages[static_cast<size_t>(rank)]);
  }
  return found;
}

int64_t Collectives::max_over_ranks(int64_t mine) {
  int64_t highest = mine;
  for (const std::string& message : exchange("the least device memory", MessageWriter().add(mine).str())) {
    MessageReader reader(message, "the least device memory");
    highest = std::max(highest, reader.next<int64_t>());
    reader.finish();
  }
  return highest;
}

void Collectives::note_scatter(ChunkId chunk) {
  ++num_scatters_;
  scatters_.add(chunk);
}

bool Collectives::all_stay(ForwardEnd mine) {
  constexpr const char* kWhat = "how the forward went";
  bool all = true;
  for (const std::string& message : exchange(kWhat, MessageWriter().add(static_cast<uint8_t>(mine)).str())) {
    MessageReader reader(message, kWhat);
    const auto theirs = reader.next<uint8_t>();
    reader.finish();
    reader.check(theirs <= static_cast<uint8_t>(ForwardEnd::kLeavesPlan), "no end of a forward");
    all = all && theirs == static_cast<uint8_t>(ForwardEnd::kStays);
  }
  return all;
}

bool Collectives::any_over_ranks(std::vector<uint8_t>& flags, BackwardEnd mine) {
  constexpr const char* kWhat = "which gradients there are";
  const std::string message_of_mine =
      MessageWriter().add(static_cast<uint8_t>(mine)).add(num_scatters_).add(scatters_.value()).add(flags).str();
  const std::vector<uint8_t> own = flags;
  bool alike = true;
  bool all_complete = true;
  std::string who;
  int rank = 0;
  for (const std::string& message : exchange(kWhat, message_of_mine)) {
    MessageReader reader(message, kWhat);
    const auto end = reader.next<uint8_t>();
    reader.check(end <= static_cast<uint8_t>(BackwardEnd::kLeavesPlan), "no end of a backward");
    all_complete = all_complete && end == static_cast<uint8_t>(BackwardEnd::kComplete);
    const auto num_scatters = reader.next<int64_t>();
    alike = reader.next<uint64_t>() == scatters_.value() && num_scatters == num_scatters_ && alike;
    const auto theirs = reader.next_list<uint8_t>(flags.size());
    reader.finish();
    for (size_t i = 0; i < flags.size(); ++i) flags[i] |= theirs[i];
    who += (rank == 0 ? "rank " : ", rank ") + std::to_string(rank) + ": " + std::to_string(num_scatters);
    ++rank;
  }
  if (!all_complete) flags = own;
  if (alike) return all_complete;
  scatter_group_->abort();
  if (part_scatter_ != nullptr) part_scatter_->abort();
  PS_CHECK(
      false, RankMismatch, "in this backward ranks that share chunks added up the gradients of other chunks than ",
      "each other, or in another order (so far ", who,
      " times); start again from a checkpoint, with the same version of PatrickStar on all ranks, and report this");
  return false;
}

StepAgreement Collectives::agree_on(Timeline& timeline, std::vector<int64_t>* planned_activation_levels,
                                    const std::string& note) {
  StepAgreement agreement;
  if (num_ranks_ == 1) {
    agreement.notes = {note};
    return agreement;
  }
  const size_t num_accesses = timeline.accesses.size();
  const uint64_t mine = fingerprint(timeline);
  std::vector<StepSummary> all;
  int64_t highest = 0;
  bool alike = true;
  bool all_follow = planned_activation_levels != nullptr;
  const StepSummary summary{mine, activation_levels_of(timeline), planned_activation_levels != nullptr,
                            planned_activation_levels != nullptr ? *planned_activation_levels : std::vector<int64_t>(),
                            note};
  for (const std::string& message : exchange("how the step went", packed(summary))) {
    all.push_back(unpacked_summary(message));
    const StepSummary& theirs = all.back();
    agreement.notes.push_back(theirs.note);
    alike = alike && theirs.fingerprint == mine && theirs.activation_levels.size() == num_accesses;
    all_follow = all_follow && theirs.follows_plan &&
                 theirs.planned_activation_levels.size() == planned_activation_levels->size();
    for (int64_t activation_memory : theirs.activation_levels) highest = std::max(highest, activation_memory);
  }
  if (!alike && timeline.accesses.empty()) timeline.accesses.emplace_back();  // it holds the maximum
  for (size_t t = 0; t < timeline.accesses.size(); ++t) {
    int64_t& activation_memory = timeline.accesses[t].activation_peak_bytes;
    if (!alike) activation_memory = highest;
    for (size_t rank = 0; alike && rank < all.size(); ++rank)
      activation_memory = std::max(activation_memory, all[rank].activation_levels[t]);
  }
  if (alike) return agreement;
  agreement.ways = all_follow ? StepAgreement::Ways::kAsPlanned : StepAgreement::Ways::kApart;
  for (size_t t = 0; all_follow && t < planned_activation_levels->size(); ++t) {
    for (const StepSummary& theirs : all)
      (*planned_activation_levels)[t] = std::max((*planned_activation_levels)[t], theirs.planned_activation_levels[t]);
  }
  return agreement;
}

Timeline Collectives::merge(const Timeline& mine, int num_chunks) {
  Timeline all;
  for (const std::string& message : exchange("which accesses the step made", packed(mine))) {
    const Timeline theirs = unpacked_timeline(message, num_chunks);
    if (!theirs.accesses.empty()) all = all.accesses.empty() ? theirs : merged(all, theirs);
  }
  return all;
}

}  // namespace patrickstar
