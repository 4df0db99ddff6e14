// A communicator: a group of ranks and the flat collectives on whole chunks that run within it.
//
// It belongs to a group, never to "the world": with sequence or tensor parallelism several exist side by side. All
// ranks of the group must call the same collectives in the same order. Calls enqueue on `stream` and return.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <string>

#include "common/dtype.h"

namespace patrickstar {

class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  // whole[r * shard_numel ...] = shard of rank r; `shard` may lie in its place within `whole`.
  virtual void all_gather(const void* shard, void* whole, int64_t shard_numel, DType dtype, cudaStream_t stream) = 0;
  // shard = sum over ranks of whole[rank * shard_numel ...]; `shard` may lie in its place within `whole`.
  virtual void reduce_scatter(const void* whole, void* shard, int64_t shard_numel, DType dtype,
                              cudaStream_t stream) = 0;
};

// An opaque id that one rank makes and all ranks of the group get (through torch's store).
std::string make_nccl_id();
// "2.28.9"
std::string nccl_version();
// Blocks until all `size` ranks have called it with the same id. Throws SystemError.
std::unique_ptr<Communicator> make_nccl_communicator(const std::string& id, int rank, int size, int device);

}  // namespace patrickstar
