#include "memory/host_arena.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "common/check.h"

namespace patrickstar {

namespace {

constexpr int64_t kHugePage = int64_t{2} << 20;
constexpr int64_t kPage = 4096;

int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// Anonymous memory that starts at a huge page when it is large enough to hold one.
char* map_memory(int64_t num_bytes) {
  const int64_t slack = num_bytes >= kHugePage ? kHugePage : 0;
  void* mapped = mmap(nullptr, static_cast<size_t>(num_bytes + slack), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  PS_CHECK(mapped != MAP_FAILED, SystemError, "cannot map ", num_bytes, " bytes of host memory: ", std::strerror(errno),
           "; lower host_memory");
  if (slack == 0) return static_cast<char*>(mapped);
  const auto address = reinterpret_cast<int64_t>(mapped);
  const int64_t begin = round_up(address, kHugePage);
  if (begin > address) munmap(mapped, static_cast<size_t>(begin - address));
  const int64_t tail = address + num_bytes + slack - (begin + num_bytes);
  if (tail > 0) munmap(reinterpret_cast<void*>(begin + num_bytes), static_cast<size_t>(tail));
  madvise(reinterpret_cast<void*>(begin), static_cast<size_t>(num_bytes), MADV_HUGEPAGE);  // a hint: may fail
  return reinterpret_cast<char*>(begin);
}

}  // namespace

HostArena::HostArena(std::shared_ptr<HostBudget> budget, RegionHooks hooks)
    : budget_(std::move(budget)), hooks_(std::move(hooks)) {}

HostArena::~HostArena() {
  release_reserved();
  for (auto& region : regions_) unmap(*region);
}

void HostArena::reserve(const std::vector<int64_t>& block_bytes) {
  int64_t total = 0;
  for (int64_t bytes : block_bytes) total += round_up(bytes, kBlockAlignment);
  PS_CHECK(total <= unreserved_bytes(), MemoryBudgetError, "the chunks need ", total,
           " bytes of host memory, the limit is ", limit_bytes(),
           budget_->mapped_bytes > mapped_bytes_ ? " for all engines of this process" : "", "; raise host_memory");
  const auto add = [this](int64_t num_bytes) {
    reserved_.push_back(std::make_shared<Reserved>(Reserved{round_up(num_bytes, kPage), nullptr, nullptr}));
    note_reserved(reserved_.back()->num_bytes);
  };
  int64_t group = 0;
  for (int64_t bytes : block_bytes) {
    const int64_t size = round_up(bytes, kBlockAlignment);
    if (group > 0 && group + size > kMaxRegionBytes) add(std::exchange(group, 0));
    group += size;
  }
  if (group > 0) add(group);
}

void HostArena::prepare_ahead() {
  if (!hooks_.prepare) return;  // mapping alone costs nothing
  for (const auto& reserved : reserved_) {
    if (reserved->done != nullptr) continue;
    if (preparer_ == nullptr) preparer_ = std::make_unique<WorkQueue>();
    // Where it fails the region stays null: whoever takes it tries again, and gets the error.
    reserved->done = preparer_->submit([this, reserved] {
      if (!abandoned_) reserved->region = make_region(reserved->num_bytes);
    });
  }
}

bool HostArena::is_preparing() const {
  return std::any_of(reserved_.begin(), reserved_.end(), [](const auto& reserved) {
    return reserved->done != nullptr && !static_cast<HostEvent&>(*reserved->done).is_over();
  });
}

void HostArena::release_reserved() {
  abandoned_ = true;
  for (const auto& reserved : reserved_) {
    if (reserved->done != nullptr) static_cast<HostEvent&>(*reserved->done).settle();
    if (reserved->region != nullptr) dispose(*reserved->region);
  }
  reserved_.clear();
  note_reserved(-reserved_bytes_);
  abandoned_ = false;
}

std::unique_ptr<HostArena::Region> HostArena::take_reserved() {
  if (reserved_.empty()) return nullptr;
  const std::shared_ptr<Reserved> first = std::move(reserved_.front());
  reserved_.pop_front();
  note_reserved(-first->num_bytes);
  if (first->done != nullptr) static_cast<HostEvent&>(*first->done).settle();
  return first->region != nullptr ? std::move(first->region) : make_region(first->num_bytes);
}

void HostArena::add_prepared_regions() {
  while (!reserved_.empty() && reserved_.front()->done != nullptr &&
         static_cast<HostEvent&>(*reserved_.front()->done).is_over()) {
    add_region(take_reserved());
  }
}

HostBlock HostArena::allocate(int64_t num_bytes) {
  HostBlock block = try_allocate(num_bytes);
  PS_CHECK(block, MemoryBudgetError, "host memory: ", num_bytes, " bytes more are needed, ", budget_->mapped_bytes,
           " of ", limit_bytes(),
           " are taken; raise host_memory, or give the device more of the "
           "model with device_memory");
  return block;
}

HostBlock HostArena::try_allocate(int64_t num_bytes) {
  const int64_t size = round_up(num_bytes, kBlockAlignment);
  HostBlock block = find_block(size, num_bytes);
  while (!block && !reserved_.empty() && reserved_.front()->num_bytes >= size) {
    add_region(take_reserved());
    block = find_block(size, num_bytes);
  }
  if (!block && size <= unreserved_bytes()) {
    add_region(make_region(size));
    block = find_block(size, num_bytes);
  }
  return block;
}

HostBlock HostArena::try_allocate_prepared(int64_t num_bytes) {
  if (!hooks_.prepare) return try_allocate(num_bytes);
  add_prepared_regions();
  return find_block(round_up(num_bytes, kBlockAlignment), num_bytes);
}

HostBlock HostArena::find_block(int64_t size, int64_t num_bytes) {
  Region* best = nullptr;
  std::map<int64_t, int64_t>::iterator best_range;
  for (auto& region : regions_) {
    for (auto range = region->free.begin(); range != region->free.end(); ++range) {
      if (range->second >= size && (best == nullptr || range->second < best_range->second)) {
        best = region.get();
        best_range = range;
      }
    }
  }
  if (best == nullptr) return {};
  const int64_t offset = best_range->first;
  const int64_t left = best_range->second - size;
  best->free.erase(best_range);
  if (left > 0) best->free.emplace(offset + size, left);
  const bool zeroed = offset >= best->touched;
  best->touched = std::max(best->touched, offset + size);
  used_bytes_ += size;
  return {*this, best->data + offset, num_bytes, zeroed};
}

void HostArena::free(void* data, int64_t num_bytes) {
  Region& region = **std::find_if(regions_.begin(), regions_.end(), [data](const auto& candidate) {
    return data >= candidate->data && data < candidate->data + candidate->num_bytes;
  });
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
  region.free.emplace(offset, size);
}

void HostArena::trim() {
  const auto is_free = [](const std::unique_ptr<Region>& region) {
    return region->free.size() == 1 && region->free.begin()->second == region->num_bytes;
  };
  for (auto& region : regions_) {
    if (is_free(region)) unmap(*region);
  }
  regions_.erase(std::remove_if(regions_.begin(), regions_.end(), [](const auto& region) { return !region->data; }),
                 regions_.end());
}

std::unique_ptr<HostArena::Region> HostArena::make_region(int64_t num_bytes) const {
  auto region = std::make_unique<Region>();
  region->num_bytes = round_up(num_bytes, kPage);
  region->free.emplace(0, region->num_bytes);
  region->data = map_memory(region->num_bytes);
  try {
    if (hooks_.place) hooks_.place(region->data, region->num_bytes);
    if (hooks_.prepare) hooks_.prepare(region->data, region->num_bytes);
  } catch (...) {
    munmap(region->data, static_cast<size_t>(region->num_bytes));  // what was not prepared is not disposed of
    throw;
  }
  return region;
}

void HostArena::add_region(std::unique_ptr<Region> region) {
  note_mapped(region->num_bytes);
  peak_mapped_bytes_ = std::max(peak_mapped_bytes_, mapped_bytes_);
  regions_.push_back(std::move(region));
}

void HostArena::unmap(Region& region) {
  if (region.data == nullptr) return;
  dispose(region);
  note_mapped(-region.num_bytes);
}

void HostArena::note_mapped(int64_t num_bytes) {
  mapped_bytes_ += num_bytes;
  budget_->mapped_bytes += num_bytes;
}

void HostArena::note_reserved(int64_t num_bytes) {
  reserved_bytes_ += num_bytes;
  budget_->reserved_bytes += num_bytes;
}

void HostArena::dispose(Region& region) const {
  if (hooks_.dispose) hooks_.dispose(region.data, region.num_bytes);
  munmap(region.data, static_cast<size_t>(region.num_bytes));
  region.data = nullptr;
}

}  // namespace patrickstar
