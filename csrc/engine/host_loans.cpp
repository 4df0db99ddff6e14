#include "engine/host_loans.h"

#include <utility>

namespace patrickstar {

void* HostLoans::take(int64_t num_bytes) {
  const int64_t others = offload_store_.peak_bytes() + speculation_.left_bytes();
  if (num_bytes > pager_.best_effort_room_bytes() - others) return nullptr;
  HostBuffer block = pager_.try_allocate_resting_tier(num_bytes);
  if (!block) return nullptr;
  void* const data = block.data;
  blocks_.emplace(data, std::move(block));
  return data;
}

}  // namespace patrickstar
