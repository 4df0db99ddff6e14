#include "plan/host_demand.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <numeric>

#include "common/ablation.h"
#include "memory/host_arena.h"

namespace patrickstar {

NewBytes new_bytes(const Layout& layout, ChunkId chunk) {
  NewBytes result;
  result.param = least_new_bytes(layout, chunk);
  if (layout.chunk(chunk).puts_values_in_place()) return result;
  for (ArrayKind kind : layout.chunk(chunk).state_kinds()) result.states.push_back(layout.num_bytes({chunk, kind}));
  return result;
}

std::vector<NewBytes> new_bytes_on_host(const Layout& layout, const std::vector<Tier>& states) {
  std::vector<NewBytes> sizes(layout.chunks().size());
  for (ChunkId chunk = 0; chunk < layout.num_chunks(); ++chunk) {
    const bool on_host = states[static_cast<size_t>(chunk)] == Tier::kHost;
    if (on_host && layout.chunk(chunk).trainable) sizes[static_cast<size_t>(chunk)] = new_bytes(layout, chunk);
  }
  return sizes;
}

AheadChoice choose_ahead(const std::vector<NewBytes>& sizes, AheadRoom room) {
  AheadChoice choice;
  const auto take = [&](const auto& blocks) {
    const int64_t bytes = std::accumulate(std::begin(blocks), std::end(blocks), int64_t{0});
    if (bytes == 0 || bytes > room.num_bytes) return false;
    room.num_bytes -= bytes;
    if (room.spare >= bytes) {
      room.spare -= bytes;
    } else {
      choice.blocks.insert(choice.blocks.end(), std::begin(blocks), std::end(blocks));
    }
    return true;
  };
  choice.chosen.assign(sizes.size(), Ahead::kNothing);
  if (is_left_out(Mechanism::kTwoPhaseUpdates)) {
    for (size_t chunk = 0; chunk < sizes.size(); ++chunk) {
      std::vector<int64_t> blocks = sizes[chunk].states;
      blocks.push_back(sizes[chunk].param);
      if (!sizes[chunk].states.empty() && take(blocks)) choice.chosen[chunk] = Ahead::kEverything;
    }
    return choice;
  }
  for (size_t chunk = 0; chunk < sizes.size(); ++chunk) {
    if (take(std::array{sizes[chunk].param})) choice.chosen[chunk] = Ahead::kParam;
  }
  if (is_left_out(Mechanism::kWholeUpdatesAhead)) return choice;
  for (size_t chunk = 0; chunk < sizes.size(); ++chunk) {
    if (choice.chosen[chunk] == Ahead::kNothing || sizes[chunk].states.empty()) continue;
    if (!take(sizes[chunk].states)) break;
    choice.chosen[chunk] = Ahead::kEverything;
  }
  return choice;
}

int64_t host_peak_bytes(const Layout& layout, const std::vector<Tier>& first_resting_tiers,
                        const std::vector<uint8_t>& states_on_device, int64_t host_limit_bytes, NewValuesAhead ahead,
                        Backwards backwards) {
  const std::vector<Tier> resting_tiers =
      later_resting_tiers(layout, first_resting_tiers, states_on_device, host_limit_bytes, Backwards::kOne);
  int64_t mapped = 0;    // for all resting chunks
  int64_t left = 0;      // of `mapped`, freed by states that moved to the device
  int64_t returned = 0;  // states that moved from the disk to the host
  int64_t accumulated = 0;
  int64_t largest = 0;
  for (ChunkId chunk = 0; chunk < layout.num_chunks(); ++chunk) {
    const ChunkSpec& spec = layout.chunk(chunk);
    const Tier first = first_resting_tiers[static_cast<size_t>(chunk)];
    if (first == Tier::kDevice) continue;
    const bool on_disk = first == Tier::kDisk;
    const int64_t bytes = on_disk ? bytes_beside_disk(layout, chunk, Backwards::kOne) : resting_tier_bytes(spec);
    mapped += bytes;
    if (states_on_device[static_cast<size_t>(chunk)] != 0) left += bytes;
    if (on_disk && resting_tiers[static_cast<size_t>(chunk)] == Tier::kHost) returned += optimizer_bytes(spec);
    if (backwards == Backwards::kSeveral) accumulated += accumulation_bytes(layout, chunk);
    if (spec.trainable) largest = std::max(largest, spec.rows.gradient().num_bytes);
  }
  if (mapped == 0) return 0;
  const int64_t in_places_left = std::min(returned, left);
  left -= in_places_left;
  mapped += disk_sets(layout, first_resting_tiers).num_bytes() + returned - in_places_left;
  int64_t peak = mapped + accumulated + largest + HostArena::most_rounding_bytes(mapped);
  if (ahead == NewValuesAhead::kWhereThereIsRoom && backwards == Backwards::kOne) {
    const int64_t reserved = reserved_gradient_bytes(layout);
    const AheadRoom room{host_limit_bytes - mapped + left - reserved, left};
    const AheadChoice choice = choose_ahead(new_bytes_on_host(layout, resting_tiers), room);
    peak += std::accumulate(choice.blocks.begin(), choice.blocks.end(), int64_t{0}) + reserved;
  }
  return std::min(peak, host_limit_bytes);
}

}  // namespace patrickstar
