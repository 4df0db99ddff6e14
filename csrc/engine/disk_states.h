// Optimizer states whose home is a disk under the host, and their way through host memory.
//
// [Note: states on the disk] A step uses each chunk's states once, in an order that is the same from step to step. Of a
// sequence that repeats itself Belady's rule keeps a fixed part and lets the rest pass through, so that is what
// placement decides (plan/homes.h): some chunks are at home on the device, some on the host, the others here. They
// are the last ones of the next forward: their gradients come first in backward, and their values are needed last, so
// they have the most time for the way from the disk and back.
//
// What passes through does so in sets: host memory for the states of one chunk, of which there are kNumDiskSets. Its
// blocks lie in the records of the chunk that has the set, so everybody else sees states in host memory. While one is
// read another is updated and one before is written back. Who takes what when is ordered by events alone, so the
// calling thread waits for nothing:
//
//   disk.fetch(chunk);      // its records have blocks, and host_ready says when the states are there
//   ... submit an update that waits for host_ready and sets it ...
//   disk.store(chunk);      // written back behind that; the set goes to the next chunk when it is
//
// [Note: lent memory] A set has one chunk at a time. The next one gets it while transfers and updates of the last one
// still run: host_ready of its records is complete when they are over, also where nothing is read for it. So whoever
// writes a block waits for host_ready and block_busy_until, be it a read, an update or what comes down from the device.
//
// The file has no room for other bytes than these: a chunk has its extents there from open() on. What was written is
// checked when it is read, by a CRC-32C that stays in memory. What fails throws DiskError, to whoever waits for the
// states ([Note: failures travel with events]), and from check() to the next step.
//
// Guarded by the engine's lock, but for what runs on the queues.
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
  int64_t limit_bytes = 0;  // 0: there is no disk
  DiskFileOptions file;
};

class DiskStates {
 public:
  DiskStates(ChunkMemory& memory, DiskOptions options);
  ~DiskStates();
  DiskStates(const DiskStates&) = delete;
  DiskStates& operator=(const DiskStates&) = delete;

  // The file and the sets for all chunks whose home it is. Throws DiskError or MemoryBudgetError.
  void open();
  // Ends what runs, whatever becomes of it, and gives all memory back.
  void close();

  bool is_home_of(ChunkId chunk) const { return memory_.store().home(chunk) == Tier::kDisk; }
  // Of the chunk those states that exist come into host memory, and all have blocks there.
  void fetch(ChunkId chunk);
  // What of them was changed in host memory goes to the disk.
  void store(ChunkId chunk);
  // The same after an update: those that come next are fetched, as far as there are sets.
  void store_updated(ChunkId chunk);
  // Updates come, in the order of the last step: the first ones' states are fetched.
  void expect_updates();
  // Updates do not come: a backward was given up, or its gradients were. States read for them stay until others need
  // the memory.
  void expect_nothing();
  // They are not at home here any more: their values are elsewhere or not wanted, and their blocks come back.
  void forget(ChunkId chunk);
  // They are at home on the host from now on, in these blocks: one for each of the chunk's states.
  void move_to_host(ChunkId chunk, std::vector<HostBlock> blocks);
  // Throws the first DiskError that a transfer has ended with.
  void check();

  const DiskOptions& options() const { return options_; }
  // What the file takes; 0: there is none.
  int64_t num_bytes() const { return file_ == nullptr ? 0 : file_->num_bytes(); }
  // DiskFile::how, or nothing.
  std::string how() const { return file_ == nullptr ? std::string() : file_->how(); }

 private:
  enum class Use : uint8_t {
    kFree,      // no chunk has it
    kLent,      // a chunk has it
    kExpected,  // a chunk has it whose update is to come: it makes room for another one last
  };
  struct Set {
    std::array<HostBlock, 3> blocks;  // for each of optimizer_arrays(), while it is free
    Use use = Use::kFree;
    ChunkId chunk = -1;       // that has it
    std::vector<Event> busy;  // what may still use its memory, of chunks that had it before
    int64_t last_use = 0;
  };
  // What the disk has of an array.
  struct Extent {
    int64_t offset = 0;
    uint32_t crc = 0;  // of what was written last; to be read after that
    Event written;
  };
  struct Piece {
    ArrayId id;
    DiskRange range;
    Extent* extent;
  };
  // Transfers between a set and the disk that run at once, without more memory.
  struct Passage {
    std::vector<Piece> pieces;
    std::shared_ptr<DiskFile::Transfer> transfer;
    int64_t num_bytes = 0;
  };

  StateKinds states_of(ChunkId chunk) const { return memory_.layout().chunk(chunk).state_kinds(); }
  Piece piece(ArrayId id, const HostBlock& block);
  Set* find(ChunkId chunk);
  // The chunk's set, which it gets if it has none.
  Set& fetched(ChunkId chunk);
  // The one that was used longest ago, free.
  Set& vacate_one();
  // Its blocks back from the chunk that has it.
  void take_back(Set& set);
  void lend(Set& set, ChunkId chunk);
  Passage prepare(DiskDirection direction, std::vector<Piece> pieces);
  // Null where nobody wants to know, or nothing passes.
  std::shared_ptr<HostSpan> open_span(Track track, ChunkId chunk, const Passage& passage);
  void run_read(const Passage& passage);
  void run_write(const Passage& passage);
  // The same, but that what it throws is known to check().
  template <typename Task>
  void noting_failures(const Task& task);

  ChunkMemory& memory_;
  DiskOptions options_;
  std::vector<Set> sets_;
  std::vector<std::array<Extent, 3>> extents_;  // by chunk, for each of optimizer_arrays()
  std::vector<ChunkId> order_;                  // of the last step's updates
  std::vector<ChunkId> running_order_;
  int64_t clock_ = 0;
  std::unique_ptr<DiskFile> file_;
  std::mutex failure_mutex_;
  std::exception_ptr first_failure_;
  WorkQueue reads_;  // these end before what they use
  WorkQueue writes_;
};

}  // namespace patrickstar
