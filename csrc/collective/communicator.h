// A communicator: a group of ranks with all-gather and reduce-scatter of whole chunks, and messages between ranks.
//
// All ranks of the group call the same collectives with the same sizes in the same order, from one thread at a time.
// Several groups may exist side by side (sequence and tensor parallelism). Communicators never wait for each other and
// may be used from two threads or on two streams at once.
//
// [Note: order of ranks] The mean over ranks is, for each element, ((x0 + x1) + x2 ...) * (1 / size) in binary32,
// rounded once to the element's type. Its bits do not depend on the shard boundaries, the network or the backend.
//
//   communicator->all_gather(device buffer, shard_bytes);
//   communicator->reduce_scatter_mean(gradients, shard, scratch, shard_numel, DType::kBFloat16);
//   communicator->exchange({{next, mine, num_bytes}}, {{before, theirs, num_bytes}});
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "common/dtype.h"

namespace patrickstar {

// Global ranks of a group's members, by group rank; for error messages. Empty: group ranks are global ranks.
using Members = std::vector<int>;

// "rank 2 of 3", or "rank 5 of a group of 3" if `members` is not empty.
std::string describe_member(const Members& members, int rank, int size);
// Throws ArgumentError unless `members` is empty or has `size` numbers.
void check_members(const Members& members, int size);

// A message to or from a rank of the group.
struct PeerBytes {
  int peer;
  void* address;
  int64_t num_bytes;
};

class Communicator : public std::enable_shared_from_this<Communicator> {
 public:
  virtual ~Communicator() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  // In place: shard r of `whole` (shard_bytes each, in rank order) comes from rank r. CUDA: enqueued on PyTorch's
  // current stream, returns at once. CPU: returns when done.
  virtual void all_gather(void* whole, int64_t shard_bytes) = 0;
  // Writes this rank's shard of the elementwise mean over ranks ([Note: order of ranks]) to `shard`, which may be its
  // place in `whole`. `scratch` has room for `size` shards and is overwritten. `whole` is not used afterwards.
  virtual void reduce_scatter_mean(void* whole, void* shard, void* scratch, int64_t shard_numel, DType dtype) = 0;
  // Messages to and from other ranks, all in flight at once. Messages between two ranks are matched in list order; both
  // sides agree on each length, and empty messages are skipped. Ranks without messages must call it as well. Blocks or
  // enqueues as all_gather. Throws ArgumentError if a peer is not another rank of the group.
  virtual void exchange(const std::vector<PeerBytes>& sends, const std::vector<PeerBytes>& receives) = 0;
  // Any thread; for failures. Calls of other threads throw RankFailure and device work ends.
  virtual void abort() = 0;
  // Any thread. Throws RankFailure if the communicator has failed.
  virtual void check() = 0;
  // Any thread. Seconds since the oldest unfinished collective was enqueued; 0 if none is pending.
  virtual double oldest_pending_seconds() = 0;
  // Frees connections, threads and memory. The owner calls it when all ranks have agreed that no work of the group
  // runs. Waits for no other rank, nor does the destructor. Later collectives throw StateError. Idempotent.
  virtual void close() = 0;
};

// Blocking exchange of small values between ranks through host memory, for both backends.
//
// Each exchange carries the user's call that this rank is in and the purpose of the exchange. If ranks differ (one has
// an extra batch, or saves while others train), all of them throw RankMismatch in this exchange. The error names each
// rank's call.
class ControlGroup : public std::enable_shared_from_this<ControlGroup> {
 public:
  virtual ~ControlGroup() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  // Sets the call that this rank is in ("forward of step 3"); empty: none. kMaxName characters are compared.
  virtual void enter(const std::string& call) = 0;
  virtual std::string call() const = 0;
  // Returns every rank's value, by rank; lengths may differ. `what` ("the gradients' norm") and the call must be equal
  // on all ranks. Throws RankFailure or RankMismatch.
  virtual std::vector<std::string> exchange(const std::string& what, const std::string& mine) = 0;
  // Like exchange(), with a separate value for each rank: `to_each` by destination; the result by source.
  virtual std::vector<std::string> distribute(const std::string& what, const std::vector<std::string>& to_each) = 0;
  virtual void abort() = 0;
  virtual void close() = 0;

  static constexpr size_t kMaxName = 63;
};

// One rank, host memory.
std::unique_ptr<Communicator> make_single_communicator();
std::unique_ptr<ControlGroup> make_single_control();

// Throws ArgumentError for messages that exchange() refuses.
void check_exchange(const Communicator& communicator, const std::vector<PeerBytes>& sends,
                    const std::vector<PeerBytes>& receives);

// A gloo group of torch.distributed, by its group_name; collectives use the group's timeout. Throws ArgumentError if
// the group is unknown or has no CPU backend.
std::unique_ptr<Communicator> make_c10d_communicator(const std::string& group_name, const Members& members);
std::unique_ptr<ControlGroup> make_c10d_control(const std::string& group_name, double timeout_seconds,
                                                const Members& members);

#ifdef PATRICKSTAR_WITH_CUDA
// One rank, memory of `device`.
std::unique_ptr<Communicator> make_cuda_single_communicator(int device);
// An opaque id. One rank creates it and sends it to all ranks of the group (through torch's store).
std::string make_nccl_id();
// "2.28.9"
std::string nccl_version();
// Blocks until all `size` ranks have called it with the same id. Throws SystemError.
std::unique_ptr<Communicator> make_nccl_communicator(const std::string& id, int rank, int size, int device,
                                                     const Members& members);
// For ranks that share GPUs: data goes through host memory and through `host`, a CPU group of the same ranks. Throws
// SystemError if the driver is too old.
std::unique_ptr<Communicator> make_cuda_staged_communicator(std::unique_ptr<Communicator> host, int device,
                                                            const Members& members);
#endif

}  // namespace patrickstar
