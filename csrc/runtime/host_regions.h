// How the runtime makes regions of the host arena ready: pages are spread over NUMA nodes, touched for the first time by
// all threads, then locked for transfers.
//
// The hooks refer to the backend and the pool, which must outlive the arena. The arena says which thread calls them.
#pragma once

#include <vector>

#include "backend/backend.h"
#include "common/thread_pool.h"
#include "memory/host_arena.h"

namespace patrickstar {

enum class PageLocking {
  kNone,  // the simulated device copies from any memory
  kForTransfers,
};

// Pages are spread over `nodes`, which may be none (memory/interleave.h).
RegionHooks make_region_hooks(Backend& backend, ThreadPool& pool, PageLocking locking, const std::vector<int>& nodes);

}  // namespace patrickstar
