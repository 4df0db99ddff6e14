// Memory for open values ([Note: settled values], optim/kernels.h) of updates that start before the clipping
// coefficient is known, and of values in place: what nobody else needs, up to the room for a part of the values.
//
//   memory.take(free_bytes, numel);     // before a backward
//   memory.keep(chunk, jobs);           // its open values will be kept there
//   memory.give_back();                 // blocks, and the event after which nobody uses them
//
// Guarded by the engine's lock, but for what runs on the queue of updates.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "common/types.h"
#include "engine/update_jobs.h"
#include "memory/host_arena.h"
#include "optim/open_store.h"

namespace patrickstar {

class OpenMemory {
 public:
  OpenMemory(int num_chunks, HostArena& arena, HostUpdates& updates)
      : arena_(arena), updates_(updates), open_(static_cast<size_t>(num_chunks)) {}

  // What was kept is over when the updates submitted so far are. At most `free_bytes` of memory are taken, unless there
  // is some already, and no more than for one in `elements_per_open` of `numel` values, which are all that come.
  void take(int64_t free_bytes, int64_t numel, int64_t elements_per_open);
  // The same places for the same jobs of a chunk, until the next take().
  void keep(ChunkId chunk, std::vector<optim::UpdateJob>& jobs);
  // The same where nothing was kept of them yet: all of these values are open.
  void begin(ChunkId chunk, std::vector<optim::UpdateJob>& jobs);
  std::vector<HostBlock> give_back(Event& after);
  bool is_empty() const { return blocks_.empty(); }
  int64_t num_in_place() const { return store_.num_in_place(); }

 private:
  HostArena& arena_;
  HostUpdates& updates_;
  optim::OpenStore store_;
  std::vector<HostBlock> blocks_;
  std::vector<std::vector<optim::OpenValues>> open_;  // of the pieces of all jobs, by chunk
};

}  // namespace patrickstar
