#include "runtime/collectives.h"

#include <algorithm>
#include <cstring>
#include <iomanip>
#include <map>
#include <set>
#include <sstream>
#include <utility>

#include "common/check.h"
#include "common/fingerprint.h"

namespace patrickstar {

namespace {

template <typename Value>
std::string packed(const std::vector<Value>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(Value)};
}

template <typename Value>
std::vector<Value> unpacked(const std::string& bytes) {
  std::vector<Value> values(bytes.size() / sizeof(Value));
  std::memcpy(values.data(), bytes.data(), values.size() * sizeof(Value));
  return values;
}

// What tells one sequence of moments from another.
uint64_t fingerprint(const Timeline& timeline) {
  Fingerprint result;
  for (const Moment& moment : timeline.moments) {
    result.add(static_cast<int64_t>(moment.phase));
    result.add(static_cast<int64_t>(moment.acquired.size()));
    for (ArrayId id : moment.acquired) result.add(id.index());
    result.add(static_cast<int64_t>(moment.accesses.size()));
    for (const Access& access : moment.accesses) {
      result.add(access.array.index() * 4 + static_cast<int64_t>(access.mode));
    }
  }
  return result.value();
}

std::string hexadecimal(uint64_t value) {
  std::ostringstream text;
  text << std::hex << std::setw(16) << std::setfill('0') << value;
  return text.str();
}

}  // namespace

Collectives::Collectives() = default;

Collectives::Collectives(std::shared_ptr<Communicator> gather, std::shared_ptr<Communicator> scatter,
                         std::shared_ptr<ControlGroup> control)
    : num_ranks_(control->size()),
      gather_group_(std::move(gather)),
      scatter_group_(std::move(scatter)),
      control_(std::move(control)) {}

void Collectives::need(ChunkId chunk) {
  bool served = false;
  while (!served) round(chunk, served);
}

void Collectives::finish_phase() {
  bool served = false;
  while (round(kPhaseOver, served)) {
  }
}

bool Collectives::round(ChunkId needed, bool& served) {
  std::vector<ChunkId> mine{needed};
  mine.insert(mine.end(), complete_.begin(), complete_.end());
  std::map<ChunkId, int> num_complete;
  std::set<ChunkId> wanted;
  for (const std::string& message : exchange(packed(mine))) {
    const std::vector<ChunkId> chunks = unpacked<ChunkId>(message);
    PS_CHECK(!chunks.empty(), StateError, "ranks are not at the same point of a step");
    if (chunks.front() != kPhaseOver) wanted.insert(chunks.front());
    for (auto chunk = chunks.begin() + 1; chunk != chunks.end(); ++chunk) ++num_complete[*chunk];
  }
  for (const auto& [chunk, count] : num_complete) {
    if (count < num_ranks_) continue;
    complete_.erase(std::find(complete_.begin(), complete_.end(), chunk));
    scatter_(chunk);
  }
  if (wanted.empty()) return false;
  gather_(*wanted.begin());
  served = needed == *wanted.begin();
  return true;
}

std::vector<std::string> Collectives::exchange(const std::string& mine) {
  if (control_ == nullptr) return {mine};
  return control_->exchange(mine);
}

void Collectives::check_same_plan(uint64_t fingerprint) {
  const std::string mine = hexadecimal(fingerprint);
  const std::vector<std::string> all = exchange(mine);
  if (std::all_of(all.begin(), all.end(), [&](const std::string& theirs) { return theirs == all.front(); })) return;
  std::string who;
  for (size_t rank = 0; rank < all.size(); ++rank) {
    who += (rank == 0 ? "rank " : ", rank ") + std::to_string(rank) + " has " + all[rank];
  }
  PS_CHECK(false, StateError, "the ranks came to have different plans (", who,
           ") and would gather in different orders; run the same version of PatrickStar on all ranks, and report this");
}

int64_t Collectives::max_over_ranks(int64_t mine) {
  int64_t highest = mine;
  for (const std::string& message : exchange(packed(std::vector<int64_t>{mine}))) {
    highest = std::max(highest, unpacked<int64_t>(message).front());
  }
  return highest;
}

void Collectives::any_over_ranks(std::vector<uint8_t>& flags) {
  for (const std::string& message : exchange(packed(flags))) {
    for (size_t i = 0; i < flags.size(); ++i) flags[i] |= static_cast<uint8_t>(message[i]);
  }
}

StepAgreement Collectives::agree_on(Timeline& timeline, const std::string& note) {
  StepAgreement agreement;
  if (num_ranks_ == 1) {
    agreement.notes = {note};
    return agreement;
  }
  const size_t num_moments = timeline.moments.size();
  std::vector<int64_t> mine{static_cast<int64_t>(fingerprint(timeline)), static_cast<int64_t>(num_moments)};
  for (const Moment& moment : timeline.moments) mine.push_back(moment.tide_peak_bytes);
  std::vector<std::vector<int64_t>> all;
  int64_t highest = 0;
  for (const std::string& message : exchange(packed(mine) + note)) {
    const auto head = unpacked<int64_t>(message.substr(0, 2 * sizeof(int64_t)));
    PS_CHECK(head.size() == 2, StateError, "ranks are not at the same point of a step");
    const size_t size = (2 + static_cast<size_t>(head[1])) * sizeof(int64_t);
    all.push_back(unpacked<int64_t>(message.substr(0, size)));
    agreement.notes.push_back(message.substr(std::min(size, message.size())));
    agreement.alike = agreement.alike && head[0] == mine[0] && all.back().size() == mine.size();
    for (size_t t = 2; t < all.back().size(); ++t) highest = std::max(highest, all.back()[t]);
  }
  for (size_t t = 0; t < num_moments; ++t) {
    int64_t& tide = timeline.moments[t].tide_peak_bytes;
    if (!agreement.alike) tide = highest;
    for (size_t rank = 0; agreement.alike && rank < all.size(); ++rank) tide = std::max(tide, all[rank][t + 2]);
  }
  return agreement;
}

}  // namespace patrickstar
