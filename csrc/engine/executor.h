// The Executor: carries out the instructions by which a value comes to the device (plan/ops.h), on the backend's
// queues. Which instructions these are, and the memory that they take, is decided by the pager.
//
//   executor.bring(id, part, arrival(id.index(), origin, sharing, Issue::kNow), std::move(staging));
//
// The array has a slot, and what its value is copied or made from stays where it is meanwhile. Guarded by the engine's
// lock.
#pragma once

#include "engine/chunk_memory.h"
#include "engine/collectives.h"
#include "plan/ops.h"

namespace patrickstar {

class Executor {
 public:
  Executor(ChunkMemory& memory, Collectives& collectives) : memory_(memory), collectives_(collectives) {}

  // `part`: this rank's shard of an array that is gathered, `id` of another.
  // [Note: staging] Codes of a quantised chunk that are on the host come up into `staging`, device memory of their own,
  // which is free again when the value is made of them, on the upload queue; empty: the value is made of nothing such.
  void bring(ArrayId id, ArrayId part, const Emitted& arrival, Slot staging);

 private:
  // A value on its way: all of an array, or this rank's part of one that is gathered.
  struct Coming {
    ArrayId id;
    ArrayId part;
    char* place;  // of the part, in the array's slot
    Event ready;  // complete when it is there; null: in the order of the compute queue
    Slot staging;
  };

  void fetch(Coming& coming);
  void cast(Coming& coming);
  void dequantize(Coming& coming);
  void gather(Coming& coming);

  ChunkMemory& memory_;
  Collectives& collectives_;
};

}  // namespace patrickstar
