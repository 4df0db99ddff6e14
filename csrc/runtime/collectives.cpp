#include "runtime/collectives.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <set>
#include <utility>

#include "common/check.h"

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

// What tells one sequence of moments from another (FNV-1a).
uint64_t fingerprint(const Timeline& timeline) {
  uint64_t hash = 14695981039346656037ull;
  const auto add = [&hash](int64_t value) {
    for (int shift = 0; shift < 64; shift += 8) {
      hash = (hash ^ (static_cast<uint64_t>(value) >> shift & 0xff)) * 1099511628211ull;
    }
  };
  for (const Moment& moment : timeline.moments) {
    add(static_cast<int64_t>(moment.phase));
    add(static_cast<int64_t>(moment.acquired.size()));
    for (ArrayId id : moment.acquired) add(id.index());
    add(static_cast<int64_t>(moment.accesses.size()));
    for (const Access& access : moment.accesses) add(access.array.index() * 4 + static_cast<int64_t>(access.mode));
  }
  return hash;
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

bool Collectives::agree_on(Timeline& timeline) {
  if (num_ranks_ == 1) return true;
  std::vector<int64_t> mine{static_cast<int64_t>(fingerprint(timeline))};
  for (const Moment& moment : timeline.moments) mine.push_back(moment.tide_peak_bytes);
  std::vector<std::vector<int64_t>> all;
  bool same = true;
  int64_t highest = 0;
  for (const std::string& message : exchange(packed(mine))) {
    all.push_back(unpacked<int64_t>(message));
    same = same && all.back().size() == mine.size() && all.back().front() == mine.front();
    for (size_t t = 1; t < all.back().size(); ++t) highest = std::max(highest, all.back()[t]);
  }
  for (size_t t = 0; t < timeline.moments.size(); ++t) {
    int64_t& tide = timeline.moments[t].tide_peak_bytes;
    if (!same) tide = highest;
    for (size_t rank = 0; same && rank < all.size(); ++rank) tide = std::max(tide, all[rank][t + 1]);
  }
  return same;
}

}  // namespace patrickstar
