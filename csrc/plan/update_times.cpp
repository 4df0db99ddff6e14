#include "plan/update_times.h"

#include "plan/chunk_bytes.h"

namespace patrickstar {

UpdateAt update_at(const UpdatedChunk& chunk, UpdateStart start, ExpectedScale scale) {
  if (!chunk.trainable) return UpdateAt::kNever;
  if (chunk.states == Tier::kDevice) return UpdateAt::kDeviceAfterNorm;
  const bool on_disk = chunk.states == Tier::kDisk;
  if (start == UpdateStart::kCommitted) return on_disk ? UpdateAt::kDiskAtRetire : UpdateAt::kHostAtRetire;
  if (on_disk) return UpdateAt::kDiskAfterNorm;
  if (start == UpdateStart::kAfterNorm || chunk.ahead == Ahead::kNothing) return UpdateAt::kHostAfterNorm;
  if (scale == ExpectedScale::kExact && chunk.ahead == Ahead::kEverything) return UpdateAt::kHostAtRetire;
  // In 32 bits nearly no value is the same for several scales.
  const bool settles = scale == ExpectedScale::kExact || chunk.dtype != DType::kFloat32;
  return settles ? UpdateAt::kHostParamFirst : UpdateAt::kHostAfterNorm;
}

void describe_updates(const Layout& layout, StepShape& shape) {
  shape.num_ranks = layout.sharding().num_ranks;
  shape.numels.clear();
  shape.disk_bytes.clear();
  for (const ChunkSpec& chunk : layout.chunks()) {
    shape.numels.push_back(chunk.shard_numel);
    shape.disk_bytes.push_back(disk_bytes(chunk));
  }
}

}  // namespace patrickstar
