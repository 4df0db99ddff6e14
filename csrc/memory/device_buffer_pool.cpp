#include "memory/device_buffer_pool.h"

#include <new>
#include <utility>

#include "common/ablation.h"

namespace patrickstar {

DeviceBuffer DeviceBufferPool::acquire(int64_t num_bytes, DeviceBufferFit fit, OverLimit over_limit) {
  const double most_waste =
      fit == DeviceBufferFit::kLoose || is_left_out(Mechanism::kExactDeviceBuffers) ? max_waste_ratio_ : 0.0;
  const bool ample = used_bytes_ + idle_bytes_ + num_bytes <= ample_bytes_;
  const auto found = find_idle(num_bytes, most_waste);
  const bool fits = found != idle_.end();
  if (fits && ample && !allocator_.is_idle(found->second.busy)) {
    if (void* data = allocator_.allocate(num_bytes)) return hand_out(data, num_bytes, {});
  }
  if (fits) return hand_out_idle(found);
  if (!ample && most_waste > 0 && !is_left_out(Mechanism::kRareSizes)) {
    const auto larger = find_idle(num_bytes, kMostDeviceBufferWaste);
    if (larger != idle_.end()) return hand_out_idle(larger);
  }
  void* data = allocator_.allocate(num_bytes);
  if (data == nullptr && idle_bytes_ > 0) {
    trim(num_bytes);
    data = allocator_.allocate(num_bytes);
  }
  if (data == nullptr && over_limit == OverLimit::kAllow) data = allocator_.allocate_over_limit(num_bytes);
  if (data == nullptr) return {};
  return hand_out(data, num_bytes, {});
}

DeviceBufferPool::IdleDeviceBuffers::iterator DeviceBufferPool::find_idle(int64_t num_bytes, double waste_ratio) {
  const auto found = idle_.lower_bound(num_bytes);
  const auto most = num_bytes + static_cast<int64_t>(static_cast<double>(num_bytes) * waste_ratio);
  return found != idle_.end() && found->first <= most ? found : idle_.end();
}

DeviceBuffer DeviceBufferPool::hand_out_idle(IdleDeviceBuffers::iterator found) {
  const int64_t size = found->first;
  Idle idle = std::move(found->second);
  idle_.erase(found);
  idle_bytes_ -= size;
  --num_of_size_[size];
  return hand_out(idle.data, size, std::move(idle.busy));
}

DeviceBuffer DeviceBufferPool::hand_out(void* data, int64_t num_bytes, BusyUntil busy) {
  try {
    ++num_of_size_[num_bytes];
  } catch (...) {
    allocator_.free(data, num_bytes, busy);
    throw;
  }
  used_bytes_ += num_bytes;
  return {*this, data, num_bytes, std::move(busy)};
}

void DeviceBufferPool::take_back(void* data, int64_t num_bytes, BusyUntil busy) noexcept {
  used_bytes_ -= num_bytes;
  try {
    idle_.emplace(num_bytes, Idle{data, busy});
    idle_bytes_ += num_bytes;
  } catch (const std::bad_alloc&) {
    forget_one(num_bytes);
    allocator_.free(data, num_bytes, busy);
  }
}

void DeviceBufferPool::forget_one(int64_t size) {
  const auto found = num_of_size_.find(size);
  if (--found->second == 0) num_of_size_.erase(found);
}

DeviceBufferPool::IdleDeviceBuffers::iterator DeviceBufferPool::most_common() {
  auto best = idle_.begin();
  if (is_left_out(Mechanism::kRareSizes)) return best;
  for (auto next = best; next != idle_.end(); next = idle_.upper_bound(next->first)) {
    if (num_of_size_[next->first] >= num_of_size_[best->first]) best = next;
  }
  return best;
}

int64_t DeviceBufferPool::trim(int64_t num_bytes) {
  int64_t freed = 0;
  while (freed < num_bytes && !idle_.empty()) {
    const auto next = most_common();
    const int64_t size = next->first;
    const Idle idle = std::move(next->second);
    idle_.erase(next);
    idle_bytes_ -= size;
    forget_one(size);
    freed += size;
    allocator_.free(idle.data, size, idle.busy);
  }
  return freed;
}

}  // namespace patrickstar
