#include "memory/slot_pool.h"

#include <utility>

namespace patrickstar {

Slot SlotPool::acquire(int64_t num_bytes, OverLimit over_limit) {
  const auto found = idle_.lower_bound(num_bytes);
  const auto largest_fit = num_bytes + static_cast<int64_t>(static_cast<double>(num_bytes) * max_waste_ratio_);
  const bool fits = found != idle_.end() && found->first <= largest_fit;
  if (fits && used_bytes_ + idle_bytes_ + num_bytes <= ample_bytes_ && !allocator_.is_idle(found->second.busy)) {
    if (void* data = allocator_.allocate(num_bytes)) {
      used_bytes_ += num_bytes;
      return {data, num_bytes, {}};
    }
  }
  if (fits) {
    Slot slot = std::move(found->second);
    idle_.erase(found);
    idle_bytes_ -= slot.num_bytes;
    used_bytes_ += slot.num_bytes;
    return slot;
  }
  void* data = allocator_.allocate(num_bytes);
  if (data == nullptr && idle_bytes_ > 0) {
    trim(num_bytes);
    data = allocator_.allocate(num_bytes);
  }
  if (data == nullptr && over_limit == OverLimit::kAllow) data = allocator_.allocate_over_limit(num_bytes);
  if (data == nullptr) return {};
  used_bytes_ += num_bytes;
  return {data, num_bytes, {}};
}

void SlotPool::release(Slot slot) {
  if (!slot) return;
  used_bytes_ -= slot.num_bytes;
  idle_bytes_ += slot.num_bytes;
  const int64_t size = slot.num_bytes;
  idle_.emplace(size, std::move(slot));
}

int64_t SlotPool::trim(int64_t num_bytes) {
  int64_t freed = 0;
  while (freed < num_bytes && !idle_.empty()) {
    auto largest = std::prev(idle_.end());
    Slot slot = std::move(largest->second);
    idle_.erase(largest);
    idle_bytes_ -= slot.num_bytes;
    freed += slot.num_bytes;
    allocator_.free(slot.data, slot.num_bytes, slot.busy);
  }
  return freed;
}

}  // namespace patrickstar
