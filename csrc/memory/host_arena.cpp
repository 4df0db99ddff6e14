#include "memory/host_arena.h"

#include <sys/mman.h>

#include <algorithm>
#include <utility>

#include "common/check.h"
#include "common/reserve.h"
#include "common/sizes.h"
#include "common/types.h"
#include "memory/host_mapping.h"

namespace patrickstar {

namespace {

constexpr int64_t kPage = 4096;

// The queue, made at its first use.
WorkQueue& made(std::unique_ptr<WorkQueue>& preparer) {
  if (preparer == nullptr) preparer = std::make_unique<WorkQueue>(ThreadPriority::kBelowLaunches);
  return *preparer;
}

}  // namespace

KeptRegions::~KeptRegions() {
  for (const Region& region : regions_) {
    if (dispose_) dispose_(region.data, region.num_bytes);
    munmap(region.data, static_cast<size_t>(region.num_bytes));
  }
}

void KeptRegions::add(Region region, const std::function<void(void*, int64_t)>& dispose) {
  regions_.push_back(region);
  dispose_ = dispose;
  num_bytes_ += region.num_bytes;
}

KeptRegions::Region KeptRegions::take(int64_t least_bytes, int64_t most_bytes) {
  const auto found = std::find_if(regions_.begin(), regions_.end(), [=](const Region& region) {
    return region.num_bytes >= least_bytes && region.num_bytes <= most_bytes;
  });
  if (found == regions_.end()) return {};
  const Region region = *found;
  regions_.erase(found);
  num_bytes_ -= region.num_bytes;
  return region;
}

HostArena::HostArena(std::shared_ptr<HostBudget> budget, RegionHooks hooks)
    : budget_(std::move(budget)), hooks_(std::move(hooks)) {}

HostArena::~HostArena() {
  for (auto& region : regions_) unmap(*region);
}

// At least one of two adjacent regions is more than half full.
int64_t HostArena::most_rounding_bytes(int64_t total_bytes) { return (2 * total_bytes / kMaxRegionBytes + 2) * kPage; }

int64_t HostArena::most_region_bytes(int64_t total_bytes) {
  return round_up(total_bytes, kPage) + 2 * total_bytes / kMaxRegionBytes * kPage;
}

std::vector<HostBuffer> HostArena::reserve(const std::vector<int64_t>& block_bytes) {
  int64_t total = 0;
  for (int64_t bytes : block_bytes) total += round_up(bytes, kBlockAlignment);
  PS_CHECK(total <= unreserved_bytes(), MemoryBudgetError, "the chunks need ", show_exactly(total),
           " of host memory, the limit is ", show_exactly(limit_bytes()),
           budget_->mapped_bytes > mapped_bytes_ ? " for all engines of this process" : "", "; raise host_memory");
  std::vector<HostBuffer> blocks;
  for (size_t begin = 0; begin < block_bytes.size();) {
    Region* region = reuse_region(round_up(block_bytes[begin], kBlockAlignment), 0);
    const int64_t most_bytes = region == nullptr ? kMaxRegionBytes : region->num_bytes;
    int64_t region_bytes = 0;
    size_t end = begin;
    for (; end < block_bytes.size(); ++end) {
      const int64_t size = round_up(block_bytes[end], kBlockAlignment);
      if (end > begin && region_bytes + size > most_bytes) break;
      region_bytes += size;
    }
    total -= region_bytes;
    if (region != nullptr && total > unreserved_bytes()) {  // the rest of this region would be missing elsewhere
      reused_->add({region->data, region->num_bytes}, hooks_.dispose);
      note_mapped(-region->num_bytes);
      regions_.pop_back();
      region = nullptr;
    }
    if (region == nullptr) region = &add_region(region_bytes, Region::Origin::kReserved);
    for (; begin < end; ++begin) blocks.push_back(take(*region, region->free.begin(), block_bytes[begin]));
  }
  return blocks;
}

HostArena::Region* HostArena::reuse_region(int64_t needed_bytes, int64_t spare_bytes) {
  if (reused_ == nullptr) return nullptr;
  reserve_one(regions_);
  const KeptRegions::Region kept = reused_->take(needed_bytes, unreserved_bytes() - spare_bytes);
  if (kept.data == nullptr) return nullptr;
  auto region = std::make_unique<Region>();
  region->data = kept.data;
  region->num_bytes = kept.num_bytes;
  region->origin = Region::Origin::kReserved;
  region->prepared = true;
  region->touched = kept.num_bytes;
  region->free.emplace(0, kept.num_bytes);
  note_mapped(kept.num_bytes);
  peak_mapped_bytes_ = std::max(peak_mapped_bytes_, mapped_bytes_);
  regions_.push_back(std::move(region));
  return regions_.back().get();
}

void HostArena::release_reused() {
  if (reused_ == nullptr) return;
  made(preparer_).submit([rest = std::exchange(reused_, nullptr)]() mutable { rest.reset(); });
}

void HostArena::prepare(HostBuffer& block) {
  if (block.prepared) return;
  prepare(region_of(block.data));
  block.prepared = true;
}

// On failure the region stays reserved for its blocks; an empty region is unmapped.
void HostArena::prepare(Region& region) {
  if (region.prepared) return;
  const bool by_thread = finish_ahead(region);
  if (!by_thread && hooks_.prepare) {
    try {
      hooks_.prepare(region.data, region.num_bytes);
    } catch (...) {
      if (region.is_free()) unmap(region);
      erase_unmapped();
      throw;
    }
  }
  region.prepared = true;
  note_reserved(-region.num_bytes);
  note_mapped(region.num_bytes);
  peak_mapped_bytes_ = std::max(peak_mapped_bytes_, mapped_bytes_);
}

bool HostArena::finish_ahead(Region& region) {
  const std::shared_ptr<Region::Ahead> ahead = std::exchange(region.ahead, nullptr);
  if (ahead == nullptr || !ahead->is_taken.exchange(true)) return false;
  static_cast<HostEvent&>(*ahead->done).settle();
  return ahead->is_prepared;
}

void HostArena::prepare_ahead() {
  if (!hooks_.prepare) return;  // mapping alone costs nothing
  for (const auto& region : regions_) {
    if (region->prepared || region->ahead != nullptr) continue;
    auto ahead = std::make_shared<Region::Ahead>();
    // On failure the first user of the region tries again and gets the error.
    ahead->done = made(preparer_).submit([this, ahead, data = region->data, num_bytes = region->num_bytes] {
      if (ahead->is_taken.exchange(true)) return;
      hooks_.prepare(data, num_bytes);
      ahead->is_prepared = true;
    });
    region->ahead = std::move(ahead);
  }
}

bool HostArena::is_preparing() const {
  return std::any_of(regions_.begin(), regions_.end(), [](const auto& region) {
    return region->ahead != nullptr && !static_cast<HostEvent&>(*region->ahead->done).is_over();
  });
}

void HostArena::add_prepared() {
  for (auto& region : regions_) {
    const auto& ahead = region->ahead;
    if (ahead != nullptr && static_cast<HostEvent&>(*ahead->done).is_over() && ahead->is_prepared) prepare(*region);
  }
}

void HostArena::release_reserved() {
  for (auto& region : regions_) {
    if (!region->prepared && region->is_free()) unmap(*region);
  }
  erase_unmapped();
}

HostBuffer HostArena::allocate(int64_t num_bytes) {
  HostBuffer block = try_allocate(num_bytes);
  PS_CHECK(block, MemoryBudgetError, "host memory: ", show_exactly(num_bytes), " more are needed, ",
           show_exactly(budget_->mapped_bytes), " of ", show_exactly(limit_bytes()),
           " are taken; raise host_memory, or give the device more of the "
           "model with device_memory");
  return block;
}

HostBuffer HostArena::try_allocate(int64_t num_bytes) {
  HostBuffer block = find_block(num_bytes, Search::kPrepared);
  if (!block) block = find_block(num_bytes, Search::kUnprepared);
  if (!block) block = allocate_in_new_region(num_bytes);
  return block;
}

HostBuffer HostArena::try_allocate_unreserved(int64_t num_bytes) {
  HostBuffer block = find_block(num_bytes, Search::kPreparedOnDemand);
  return block ? std::move(block) : allocate_in_new_region(num_bytes);
}

HostBuffer HostArena::try_allocate_prepared(int64_t num_bytes) {
  if (!hooks_.prepare) return try_allocate(num_bytes);
  add_prepared();
  return find_block(num_bytes, Search::kPrepared);
}

HostBuffer HostArena::allocate_in_new_region(int64_t num_bytes) {
  if (most_region_bytes(num_bytes) > unreserved_bytes()) return {};
  Region& region = add_region(num_bytes, Region::Origin::kOnDemand);
  prepare(region);
  return take(region, region.free.begin(), num_bytes);
}

// Best fit.
HostBuffer HostArena::find_block(int64_t num_bytes, Search search) {
  const int64_t size = round_up(num_bytes, kBlockAlignment);
  Region* best = nullptr;
  FreeRanges::iterator best_range;
  for (auto& region : regions_) {
    if (region->prepared == (search == Search::kUnprepared)) continue;
    if (search == Search::kPreparedOnDemand && region->origin == Region::Origin::kReserved) continue;
    for (auto range = region->free.begin(); range != region->free.end(); ++range) {
      if (range->second >= size && (best == nullptr || range->second < best_range->second)) {
        best = region.get();
        best_range = range;
      }
    }
  }
  if (best == nullptr) return {};
  prepare(*best);
  return take(*best, best_range, num_bytes);
}

HostBuffer HostArena::take(Region& region, FreeRanges::iterator range, int64_t num_bytes) {
  const int64_t size = round_up(num_bytes, kBlockAlignment);
  const int64_t offset = range->first;
  const int64_t left = range->second - size;
  if (left > 0) {
    FreeRanges made;
    made.emplace(0, 0);
    reserve_one(region.free_nodes);
    region.free_nodes.push_back(made.extract(made.begin()));
    put(region, region.free.extract(range), offset + size, left);
  } else {
    reserve_one(region.free_nodes);
    region.free_nodes.push_back(region.free.extract(range));
  }
  const bool zeroed = offset >= region.touched;
  region.touched = std::max(region.touched, offset + size);
  used_bytes_ += size;
  return {*this, region.data + offset, num_bytes, zeroed, region.prepared};
}

HostArena::Region& HostArena::region_of(const void* data) {
  return **std::find_if(regions_.begin(), regions_.end(), [data](const auto& candidate) {
    return data >= candidate->data && data < candidate->data + candidate->num_bytes;
  });
}

void HostArena::put(Region& region, FreeNode node, int64_t offset, int64_t size) {
  node.key() = offset;
  node.mapped() = size;
  region.free.insert(std::move(node));
}

void HostArena::free(void* data, int64_t num_bytes) noexcept {
  Region& region = region_of(data);
  FreeNode node = std::move(region.free_nodes.back());
  region.free_nodes.pop_back();
  int64_t offset = static_cast<char*>(data) - region.data;
  int64_t size = round_up(num_bytes, kBlockAlignment);
  used_bytes_ -= size;
  auto next = region.free.lower_bound(offset);
  if (next != region.free.end() && next->first == offset + size) {
    size += next->second;
    next = region.free.erase(next);
  }
  if (next != region.free.begin()) {
    auto previous = std::prev(next);
    if (previous->first + previous->second == offset) {
      previous->second += size;
      return;
    }
  }
  put(region, std::move(node), offset, size);
}

void HostArena::trim() {
  for (auto& region : regions_) {
    if (region->prepared && region->is_free()) unmap(*region);
  }
  erase_unmapped();
}

HostArena::Region& HostArena::add_region(int64_t num_bytes, Region::Origin origin) {
  reserve_one(regions_);
  auto region = std::make_unique<Region>();
  region->num_bytes = round_up(num_bytes, kPage);
  region->origin = origin;
  region->free.emplace(0, region->num_bytes);
  region->data = map_host_memory(region->num_bytes);
  if (hooks_.place) hooks_.place(region->data, region->num_bytes);
  note_reserved(region->num_bytes);
  regions_.push_back(std::move(region));
  return *regions_.back();
}

void HostArena::unmap(Region& region) {
  const bool by_thread = finish_ahead(region);
  KeptRegions* const keeper = keeper_ != nullptr ? keeper_.get() : reused_.get();
  if (keeper != nullptr && (region.prepared || by_thread)) {
    keeper->add({region.data, region.num_bytes}, hooks_.dispose);
    region.data = nullptr;
    return region.prepared ? note_mapped(-region.num_bytes) : note_reserved(-region.num_bytes);
  }
  if ((region.prepared || by_thread) && hooks_.dispose) hooks_.dispose(region.data, region.num_bytes);
  munmap(region.data, static_cast<size_t>(region.num_bytes));
  region.data = nullptr;
  region.prepared ? note_mapped(-region.num_bytes) : note_reserved(-region.num_bytes);
}

void HostArena::erase_unmapped() {
  regions_.erase(std::remove_if(regions_.begin(), regions_.end(), [](const auto& region) { return !region->data; }),
                 regions_.end());
}

void HostArena::note_mapped(int64_t num_bytes) {
  mapped_bytes_ += num_bytes;
  budget_->mapped_bytes += num_bytes;
}

void HostArena::note_reserved(int64_t num_bytes) {
  reserved_bytes_ += num_bytes;
  budget_->reserved_bytes += num_bytes;
}

}  // namespace patrickstar
