#include "memory/slot_pool.h"

#include <iterator>
#include <utility>

namespace patrickstar {

Slot SlotPool::acquire(int64_t num_bytes, OverLimit over_limit) {
  const auto found = idle_.lower_bound(num_bytes);
  const auto largest_fit = num_bytes + static_cast<int64_t>(static_cast<double>(num_bytes) * max_waste_ratio_);
  const bool fits = found != idle_.end() && found->first <= largest_fit;
  if (fits && used_bytes_ + idle_bytes_ + num_bytes <= ample_bytes_ && !allocator_.is_idle(found->second.busy)) {
    if (void* data = allocator_.allocate(num_bytes)) {
      used_bytes_ += num_bytes;
      return {*this, data, num_bytes, {}};
    }
  }
  if (fits) {
    const int64_t size = found->first;
    Idle idle = std::move(found->second);
    idle_.erase(found);
    idle_bytes_ -= size;
    used_bytes_ += size;
    return {*this, idle.data, size, std::move(idle.busy)};
  }
  void* data = allocator_.allocate(num_bytes);
  if (data == nullptr && idle_bytes_ > 0) {
    trim(num_bytes);
    data = allocator_.allocate(num_bytes);
  }
  if (data == nullptr && over_limit == OverLimit::kAllow) data = allocator_.allocate_over_limit(num_bytes);
  if (data == nullptr) return {};
  used_bytes_ += num_bytes;
  return {*this, data, num_bytes, {}};
}

void SlotPool::take_back(void* data, int64_t num_bytes, BusyUntil busy) {
  used_bytes_ -= num_bytes;
  idle_bytes_ += num_bytes;
  idle_.emplace(num_bytes, Idle{data, std::move(busy)});
}

int64_t SlotPool::trim(int64_t num_bytes) {
  int64_t freed = 0;
  while (freed < num_bytes && !idle_.empty()) {
    const auto largest = std::prev(idle_.end());
    const int64_t size = largest->first;
    const Idle idle = std::move(largest->second);
    idle_.erase(largest);
    idle_bytes_ -= size;
    freed += size;
    allocator_.free(idle.data, size, idle.busy);
  }
  return freed;
}

}  // namespace patrickstar
