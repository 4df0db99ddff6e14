// Host memory lent to Python, for copies of values that a thread writes to a checkpoint during later steps.
//
// The memory comes from what chunks do not reserve, beside what gradients and activations have taken in earlier steps.
// Speculative updates have less of it until it comes back. Guarded by the engine's lock.
#pragma once

#include <cstdint>
#include <map>

#include "engine/offload_store.h"
#include "engine/pager.h"
#include "engine/speculation.h"

namespace patrickstar {

class HostLoans {
 public:
  HostLoans(Pager& pager, const Speculation& speculation, const OffloadStore& offload_store)
      : pager_(pager), speculation_(speculation), offload_store_(offload_store) {}

  // Null: no room.
  void* take(int64_t num_bytes);
  void give_back(void* data) { blocks_.erase(data); }

 private:
  Pager& pager_;
  const Speculation& speculation_;
  const OffloadStore& offload_store_;
  std::map<void*, HostBuffer> blocks_;
};

}  // namespace patrickstar
