// Optimizer states that rest on a disk, and their way through host memory.
//
// A step uses each chunk's states once, in the same order in every step. For such a cycle, Belady's rule keeps a fixed
// part in memory and streams the rest. So placement assigns each chunk to one tier (plan/resting_tiers.h). Chunks that
// rest on the disk are the last ones of a forward: backward makes their gradients first and forward needs their values
// last, which leaves the most time for disk transfers.
//
// States pass through `sets`: host memory for the states of one chunk each, kNumDiskSets of them. A set's buffers lie
// in the records of the chunk that has the set, so other code sees states in host memory. One set is read, another
// updated and a third written back at the same time. Events alone order their use; the calling thread never waits:
//
//   disk.fetch(chunk);      // the records get buffers; host_ready completes when the states are read
//   ... submit an update that waits for host_ready and sets it ...
//   disk.store(chunk);      // written back after the update; the set passes to the next chunk after the write
//
// A set passes to its next chunk while transfers and updates of the last one still run. host_ready of the new records
// completes when those are over, even if nothing is read. So every writer of a buffer (read, update or download) waits
// for host_ready and host_buffer_busy_until.
//
// Each chunk has fixed extents of the file from open() on. Reads are checked against the CRC-32C of the last write,
// which stays in memory. A failed transfer throws DiskError from every wait for the states, and from check() before the
// next step.
//
// Guarded by the engine's lock, except tasks on the queues.
#pragma once

#include <array>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "common/work_queue.h"
#include "engine/chunk_memory.h"
#include "memory/disk_file.h"
#include "plan/chunk_bytes.h"

namespace patrickstar {

struct DiskOptions {
  std::string folder;
  int64_t limit_bytes = 0;  // 0: no disk
  DiskFileOptions file;
};

class DiskStates {
 public:
  DiskStates(ChunkMemory& memory, DiskOptions options);
  ~DiskStates();
  DiskStates(const DiskStates&) = delete;
  DiskStates& operator=(const DiskStates&) = delete;

  // Creates the file, and the sets for all chunks that rest on the disk. Throws DiskError or MemoryBudgetError.
  void open();
  // Waits for running transfers, ignores their failures, and frees all memory.
  void close();

  bool is_resting_tier_of(ChunkId chunk) const { return memory_.store().resting_tier(chunk) == Tier::kDisk; }
  // Gives all of the chunk's states buffers in host memory, and starts reading those that exist.
  void fetch(ChunkId chunk);
  void store(ChunkId chunk);
  // store() after an update; then fetches states of the next updates, as far as sets are free.
  void store_updated(ChunkId chunk);
  // A backward begins: fetches the states of the first updates, in the order of the last step.
  void expect_updates();
  // No updates will follow: a backward or its gradients were dropped. States already read stay until their set is
  // needed.
  void expect_nothing();
  // The chunk's states no longer rest here: they were moved or dropped. Takes back its buffers.
  void forget(ChunkId chunk);
  // Moves the chunk's resting tier to the host, into `blocks`: one per state.
  void move_to_host(ChunkId chunk, std::vector<HostBuffer> blocks);
  // Throws the first DiskError of any transfer.
  void check();

  const DiskOptions& options() const { return options_; }
  int64_t num_bytes() const { return file_ == nullptr ? 0 : file_->num_bytes(); }
  std::string how() const { return file_ == nullptr ? std::string() : file_->how(); }

 private:
  enum class Use : uint8_t {
    kFree,      // no chunk has it
    kLent,      // a chunk has it
    kExpected,  // a chunk has it and its update is to come: evicted last
  };
  struct Set {
    std::array<HostBuffer, 3> blocks;  // by optimizer_arrays(), while the set is free
    Use use = Use::kFree;
    ChunkId chunk = -1;       // that has the set
    std::vector<Event> busy;  // of earlier chunks, that may still use the memory
    int64_t last_use = 0;
  };
  struct Extent {
    int64_t offset = 0;
    uint32_t crc = 0;  // of the last write; read it after `written`
    Event written;
  };
  struct Piece {
    ArrayId id;
    DiskRange range;
    Extent* extent;
  };
  // Concurrent transfers between a set and the disk, with their memory.
  struct Passage {
    std::vector<Piece> pieces;
    std::shared_ptr<DiskFile::Transfer> transfer;
    int64_t num_bytes = 0;
  };

  StateKinds states_of(ChunkId chunk) const { return memory_.layout().chunk(chunk).state_kinds(); }
  Piece piece(ArrayId id, const HostBuffer& block);
  Set* find(ChunkId chunk);
  // The chunk's set; it gets one if it has none.
  Set& fetched(ChunkId chunk);
  // Frees the least recently used set and returns it.
  Set& evict_one();
  void take_back(Set& set);
  void lend(Set& set, ChunkId chunk);
  Passage prepare(DiskDirection direction, std::vector<Piece> pieces);
  // Null if no trace is taken or nothing is transferred.
  std::shared_ptr<HostSpan> open_span(Track track, ChunkId chunk, const Passage& passage);
  void run_read(const Passage& passage);
  void run_write(const Passage& passage);
  // Runs `task`; check() will throw its failure again.
  template <typename Task>
  void noting_failures(const Task& task);

  ChunkMemory& memory_;
  DiskOptions options_;
  std::vector<Set> sets_;
  std::vector<std::array<Extent, 3>> extents_;  // by chunk and optimizer_arrays()
  std::vector<ChunkId> order_;                  // of the last step's updates
  std::vector<ChunkId> running_order_;
  int64_t clock_ = 0;
  std::unique_ptr<DiskFile> file_;
  std::mutex failure_mutex_;
  std::exception_ptr first_failure_;
  WorkQueue reads_;  // the queues end before the members above
  WorkQueue writes_;
};

}  // namespace patrickstar
