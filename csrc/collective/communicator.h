// A communicator: a group of ranks, the flat collectives on whole chunks that run within it, and messages from rank to
// rank.
//
// It belongs to a group, never to "the world": with sequence or tensor parallelism several exist side by side. All
// ranks of the group call the same collectives with the same sizes in the same order, each from one thread at a time.
// Two communicators never wait for each other, and may be used from two threads, or on two streams, at once.
//
// [Note: order of ranks] The mean over ranks is, for each element, ((x0 + x1) + x2 ...) * (1 / size) in binary32,
// rounded once to the element's type. So its bits depend neither on where shards are cut, nor on the network, nor on
// the backend.
//
// [Note: failure of a rank] A collective that another rank does not complete throws RankFailure, which names that rank
// as far as this one can know it; the communicator is of no more use then. On CUDA nothing is thrown by the collective
// itself: check() and oldest_pending_seconds() tell a watching thread, which calls abort().
//
// [Note: the end of a group] Whoever made a communicator closes it, when all ranks have said that nothing of it runs
// any more; what it holds (connections, threads, memory) goes then, on all ranks at the same point. Neither close() nor
// a destructor waits for another rank.
//
//   communicator->all_gather(slot, shard_bytes);
//   communicator->reduce_scatter_mean(gradients, shard, scratch, shard_numel, DType::kBFloat16);
//   communicator->exchange({{next, mine, num_bytes}}, {{before, theirs, num_bytes}});
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "common/dtype.h"

namespace patrickstar {

// The ranks of a group by their numbers in the run, for errors. Empty: the group's own numbers are the run's.
using Members = std::vector<int>;

// "rank 2 of 3", or "rank 5 of a group of 3" where the group has numbers of the run.
std::string describe_member(const Members& members, int rank, int size);
// Throws ArgumentError unless `members` is empty or has `size` numbers.
void check_members(const Members& members, int size);

// Bytes that go to a rank of a group, or come from it.
struct PeerBytes {
  int peer;
  void* address;
  int64_t num_bytes;
};

class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  // In place: shard r of `whole` (shard_bytes each, in the order of ranks) comes from rank r. CUDA: enqueued on
  // PyTorch's current stream, returns at once. CPU: returns when done.
  virtual void all_gather(void* whole, int64_t shard_bytes) = 0;
  // Own shard of the elementwise mean over ranks ([Note: order of ranks]) into `shard`, which may lie in its place in
  // `whole`. `scratch` has room for `size` shards and is overwritten; `whole` is not needed afterwards.
  virtual void reduce_scatter_mean(void* whole, void* shard, void* scratch, int64_t shard_numel, DType dtype) = 0;
  // Messages to and from other ranks, all of them on their way at once, in any directions. What two ranks send each
  // other is matched in the order of their lists, and both sides agree on each message's length; those of no bytes are
  // left out. Ranks without messages call it as well. CUDA and CPU as all_gather. Throws ArgumentError for a peer that
  // is no other rank of the group.
  virtual void exchange(const std::vector<PeerBytes>& sends, const std::vector<PeerBytes>& receives) = 0;
  // Any thread. Stops what is running: calls of other threads throw RankFailure, device work ends. For failures.
  virtual void abort() = 0;
  // Any thread. Throws RankFailure when the communicator has failed.
  virtual void check() = 0;
  // Any thread. For how long the oldest collective that is not finished has been enqueued or running; 0 without one.
  virtual double oldest_pending_seconds() = 0;
  // [Note: the end of a group] Later collectives throw StateError. Idempotent.
  virtual void close() = 0;
};

// Small values over the hosts, for agreement between ranks: blocking, on the CPU for both backends.
//
// [Note: ranks at the same point] Each exchange carries what this rank is doing: the call of the user's that it is in,
// and what of it the exchange is for. Where ranks do different things (one has a batch more, or saves while the others
// train), all of them find out in this very exchange and throw RankMismatch, which names who does what.
class ControlGroup {
 public:
  virtual ~ControlGroup() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  // The call that this rank is in from now on ("forward of step 3"); empty: none. At most kMaxName characters count.
  virtual void enter(const std::string& call) = 0;
  virtual std::string call() const = 0;
  // Everybody's value by rank; values may have any lengths. `what` must be the same on all ranks ("the gradients'
  // norm"), and so must the call. Throws RankFailure, RankMismatch.
  virtual std::vector<std::string> exchange(const std::string& what, const std::string& mine) = 0;
  // The same with another value for each rank: `to_each` by rank; what comes from each, by rank.
  virtual std::vector<std::string> distribute(const std::string& what, const std::vector<std::string>& to_each) = 0;
  // As Communicator's.
  virtual void abort() = 0;
  virtual void close() = 0;

  static constexpr size_t kMaxName = 63;
};

// One rank, no messages, on host memory.
std::unique_ptr<Communicator> make_single_communicator();
std::unique_ptr<ControlGroup> make_single_control();

// Throws what exchange() throws for messages that it refuses.
void check_exchange(const Communicator& communicator, const std::vector<PeerBytes>& sends,
                    const std::vector<PeerBytes>& receives);

// A gloo group of torch.distributed, by its group_name; the group's own timeout is the collectives'. Throws
// ArgumentError for a group that is unknown or has nothing for the CPU.
std::unique_ptr<Communicator> make_c10d_communicator(const std::string& group_name, const Members& members);
std::unique_ptr<ControlGroup> make_c10d_control(const std::string& group_name, double timeout_seconds,
                                                const Members& members);

#ifdef PATRICKSTAR_WITH_CUDA
// One rank, no messages, on the memory of `device`.
std::unique_ptr<Communicator> make_cuda_single_communicator(int device);
// An opaque id that one rank makes and all ranks of the group get (through torch's store).
std::string make_nccl_id();
// "2.28.9"
std::string nccl_version();
// Blocks until all `size` ranks have called it with the same id. Throws SystemError.
std::unique_ptr<Communicator> make_nccl_communicator(const std::string& id, int rank, int size, int device,
                                                     const Members& members);
// For the memory of `device`, which other ranks of the group may share: what is sent goes through host memory and
// `host`, a group of the same ranks for that. Throws SystemError where the driver is too old.
std::unique_ptr<Communicator> make_cuda_staged_communicator(std::unique_ptr<Communicator> host, int device,
                                                            const Members& members);
#endif

}  // namespace patrickstar
