// Reads and writes bytes of a chunk's arrays in their device buffer or host buffer, wherever the value is.
//
//   bytes.write({chunk, ArrayKind::kMaster}, offset, {values, Tier::kHost}, num_bytes);
//
// Calls return when the bytes are complete. Guarded by the engine's lock.
#pragma once

#include <cstdint>

#include "engine/pager.h"

namespace patrickstar {

struct ParamBytes {
  const void* data;
  Tier where;  // on the device: complete in the order of the compute queue
};

class ArrayBytes {
 public:
  explicit ArrayBytes(Pager& pager) : pager_(pager), memory_(pager.memory()) {}

  // An array on the device is written there and its host copy becomes stale. While an operation holds the array, both
  // copies are written.
  void write(ArrayId id, int64_t offset_bytes, ParamBytes from, int64_t num_bytes);
  // `to` is host memory.
  void read(ArrayId id, int64_t offset_bytes, void* to, int64_t num_bytes);
  // Writes the device buffer alone and ignores other copies. Enqueued, not awaited.
  void enqueue_to_device_buffer(ArrayId id, int64_t offset_bytes, const void* from, int64_t num_bytes);
  void copy_to_host(void* to, ParamBytes from, int64_t num_bytes);

 private:
  Pager& pager_;
  ChunkMemory& memory_;
};

}  // namespace patrickstar
