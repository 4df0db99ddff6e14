// Gathers a chunk's compute values from the ranks that hold one copy of the model together.
//
// This rank's shard goes up into its place in the chunk's slot, or is cast there from a master on the device; then an
// all-gather in place brings the others'. When it is a chunk's turn, on all ranks alike, is decided elsewhere
// (collectives.h); this is what is done then. Owned by Runtime, guarded by its lock.
#pragma once

#include "runtime/pager.h"

namespace patrickstar {

class ChunkGather {
 public:
  ChunkGather(Core core, Pager& pager);
  ~ChunkGather();

 private:
  void gather(ChunkId chunk);
  // Returns the event after which this rank's shard is in `place`, which lies in `slot`.
  Event place_shard(ChunkId chunk, void* place, const Slot& slot);

  Core core_;
  Pager& pager_;
};

}  // namespace patrickstar
