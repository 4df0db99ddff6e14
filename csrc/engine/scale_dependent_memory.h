// Host memory for scale-dependent values (optim/kernels.h) of speculative updates, in place or not. It uses memory that
// nothing else needs, up to room for a share of the values.
//
//   memory.take(free_bytes, numel);     // before a backward
//   memory.keep(chunk, jobs);           // its scale-dependent values will be kept there
//   memory.give_back();                 // host buffers, and the event after which nothing uses them
//
// Guarded by the engine's lock, except tasks on the queue of updates.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "common/types.h"
#include "engine/update_jobs.h"
#include "memory/host_arena.h"
#include "optim/scale_dependent_store.h"

namespace patrickstar {

class ScaleDependentMemory {
 public:
  ScaleDependentMemory(int num_chunks, HostArena& arena, HostUpdates& updates)
      : arena_(arena), updates_(updates), scale_dependent_(static_cast<size_t>(num_chunks)) {}

  // Forgets kept values, in the order of submitted updates. Allocates at most `free_bytes`, unless memory is allocated
  // already, and at most room for one in `elements_per_scale_dependent` of the `numel` values to come.
  void take(int64_t free_bytes, int64_t numel, int64_t elements_per_scale_dependent);
  // Assigns the jobs of a chunk their places; the same ones until the next take().
  void keep(ChunkId chunk, std::vector<optim::UpdateJob>& jobs);
  // keep() for a new update: all its values count as scale-dependent until computed.
  void begin(ChunkId chunk, std::vector<optim::UpdateJob>& jobs);
  std::vector<HostBuffer> give_back(Event& after);
  bool is_empty() const { return blocks_.empty(); }
  int64_t num_in_place() const { return store_.num_in_place(); }

 private:
  HostArena& arena_;
  HostUpdates& updates_;
  optim::ScaleDependentStore store_;
  std::vector<HostBuffer> blocks_;
  std::vector<std::vector<optim::ScaleDependentValues>> scale_dependent_;  // by chunk: for the pieces of all its jobs
};

}  // namespace patrickstar
