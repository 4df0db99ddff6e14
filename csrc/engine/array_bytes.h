// Bytes of a chunk's arrays, read and written where the array is: in its slot, or in its block.
//
//   bytes.write({chunk, ArrayKind::kMaster}, offset, {values, Tier::kHost}, num_bytes);
//
// Calls return when the bytes are there. Guarded by the engine's lock.
#pragma once

#include <cstdint>

#include "engine/pager.h"

namespace patrickstar {

// Elements of a parameter, of any type.
struct ParamBytes {
  const void* data;
  Tier where;  // on the device: complete when the compute queue gets there
};

class ArrayBytes {
 public:
  explicit ArrayBytes(Pager& pager) : pager_(pager), memory_(pager.memory()) {}

  // An array on the device is written there, and a copy on the host is stale then. While an operation holds the array,
  // both are written.
  void write(ArrayId id, int64_t offset_bytes, ParamBytes from, int64_t num_bytes);
  // `to` is host memory.
  void read(ArrayId id, int64_t offset_bytes, void* to, int64_t num_bytes);
  // The array's slot alone, whatever else has a copy. Enqueued, not awaited.
  void enqueue_to_slot(ArrayId id, int64_t offset_bytes, const void* from, int64_t num_bytes);
  void copy_to_host(void* to, ParamBytes from, int64_t num_bytes);

 private:
  Pager& pager_;
  ChunkMemory& memory_;
};

}  // namespace patrickstar
