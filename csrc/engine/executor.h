// Carries out the instructions that bring a value to the device (plan/ops.h), on the backend's queues. The pager
// chooses the instructions and the memory.
//
//   executor.bring(id, part, arrival(id.index(), origin, sharing, Issue::kNow), std::move(staging));
//
// The array must have a device buffer, and the source of its value must stay in place until the copy is complete.
// Guarded by the engine's lock.
#pragma once

#include "engine/chunk_memory.h"
#include "engine/collectives.h"
#include "plan/ops.h"

namespace patrickstar {

class Executor {
 public:
  Executor(ChunkMemory& memory, Collectives& collectives) : memory_(memory), collectives_(collectives) {}

  // `part`: this rank's shard if `id` is all-gathered, otherwise `id`. `staging`: device memory into which codes of a
  // quantised chunk are uploaded from the host; freed in the order of the upload queue after dequantisation. Empty if
  // no codes are uploaded.
  void bring(ArrayId id, ArrayId part, const Emitted& arrival, DeviceBuffer staging);

 private:
  // A value on its way to the device: a whole array, or this rank's part of an all-gathered one.
  struct Coming {
    ArrayId id;
    ArrayId part;
    char* place;  // of `part`, in the array's device buffer
    Event ready;  // completes the value; null: in the order of the compute queue
    DeviceBuffer staging;
  };

  void fetch(Coming& coming);
  void cast(Coming& coming);
  void dequantize(Coming& coming);
  void gather(Coming& coming);

  ChunkMemory& memory_;
  Collectives& collectives_;
};

}  // namespace patrickstar
