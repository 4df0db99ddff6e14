// Host memory for payloads: an arena of our own instead of malloc or cudaHostAlloc.
//
// Memory comes from mmap in regions, asks for huge pages (the CPU's Adam runs 15 % faster on them), and a
// region is pinned as a whole by the function given (cudaHostRegister on CUDA: measured 12 GB/s including a parallel
// first touch, against 3.3 for cudaHostAlloc). A block lies in one region, so one pinned range covers it.
// Blocks are found best-fit and coalesce when freed. Guarded by the runtime's lock.
//
// Preparing memory takes seconds per 50 GB. [Note: regions ahead] A reserved region is prepared when a block of it is
// first needed, or before by a thread of the arena's own once prepare_ahead() was called, beside whatever else runs.
// Whoever needs one earlier prepares it himself, or waits for it where the thread has begun.
//
// Pinning keeps the process from launching kernels, 20 ms per GiB. Regions are small, so that what a launching thread
// is ahead of the device covers each pause, and whoever needs a block waits for little beside it.
//
// [Note: places] A reserved block has its place from the beginning, so that whatever sizes are asked for in whatever
// order meanwhile, it fits when its turn comes. It may be used once prepare() returned.
//
// Arenas of one process count against one budget. A block goes back to its arena when it is destroyed, which outlives
// it.
//
//   HostArena arena(std::make_shared<HostBudget>(/*limit_bytes=*/8 << 30), {});
//   HostBlock block = arena.allocate(1 << 20);   // throws MemoryBudgetError over the limit
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "common/event.h"
#include "common/work_queue.h"

namespace patrickstar {

class HostArena;

// [Note: who frees what] (docs/design.md) Memory of an arena; null, or owned. Whoever destroys it sees to it that
// nobody uses its memory any more.
class HostBlock {
 public:
  HostBlock() = default;
  HostBlock(HostArena& arena, void* data, int64_t num_bytes, bool zeroed, bool prepared)
      : data(data), num_bytes(num_bytes), zeroed(zeroed), prepared(prepared), arena_(&arena) {}
  ~HostBlock() { reset(); }
  HostBlock(HostBlock&& other) noexcept { swap(other); }
  HostBlock& operator=(HostBlock&& other) noexcept {
    HostBlock(std::move(other)).swap(*this);
    return *this;
  }
  HostBlock(const HostBlock&) = delete;
  HostBlock& operator=(const HostBlock&) = delete;

  explicit operator bool() const { return data != nullptr; }
  void reset();
  void swap(HostBlock& other) noexcept {
    std::swap(data, other.data);
    std::swap(num_bytes, other.num_bytes);
    std::swap(zeroed, other.zeroed);
    std::swap(prepared, other.prepared);
    std::swap(arena_, other.arena_);
  }

  void* data = nullptr;
  int64_t num_bytes = 0;
  bool zeroed = false;    // fresh from the system: all bytes are zero
  bool prepared = false;  // HostArena::prepare

 private:
  HostArena* arena_ = nullptr;
};

// What the arenas of a process may map together. Guarded by the lock of those who share it.
struct HostBudget {
  explicit HostBudget(int64_t limit_bytes) : limit_bytes(limit_bytes) {}

  // What may still be mapped or reserved.
  int64_t unreserved_bytes() const { return limit_bytes - mapped_bytes - reserved_bytes; }

  const int64_t limit_bytes;
  int64_t mapped_bytes = 0;
  int64_t reserved_bytes = 0;  // to be mapped
};

// What to do with a new region before use and with an old one before it is unmapped; each may be empty. `place` takes
// no time and comes before anything touches the region; `prepare` may take seconds. Both are called by any thread.
// `dispose` may outlive whoever made it.
struct RegionHooks {
  std::function<void(void* data, int64_t num_bytes)> place;
  std::function<void(void* data, int64_t num_bytes)> prepare;
  std::function<void(void* data, int64_t num_bytes)> dispose;
};

// Regions of an arena that has ended or gives memory back, prepared as they are, for another arena. What nobody takes
// is given back to the system with this.
class KeptRegions {
 public:
  struct Region {
    char* data = nullptr;
    int64_t num_bytes = 0;
  };

  KeptRegions() = default;
  ~KeptRegions();
  KeptRegions(const KeptRegions&) = delete;
  KeptRegions& operator=(const KeptRegions&) = delete;

  void add(Region region, const std::function<void(void* data, int64_t num_bytes)>& dispose);
  // The first that has so many bytes and no more than `most_bytes`; an empty one: there is none.
  Region take(int64_t least_bytes, int64_t most_bytes);
  int64_t num_bytes() const { return num_bytes_; }

 private:
  std::vector<Region> regions_;
  std::function<void(void* data, int64_t num_bytes)> dispose_;
  int64_t num_bytes_ = 0;
};

class HostArena {
 public:
  static constexpr int64_t kBlockAlignment = 256;
  static constexpr int64_t kMaxRegionBytes = int64_t{256} << 20;

  HostArena(std::shared_ptr<HostBudget> budget, RegionHooks hooks);
  // All blocks are gone.
  ~HostArena();
  HostArena(const HostArena&) = delete;
  HostArena& operator=(const HostArena&) = delete;

  // What reserving blocks of `total_bytes` takes beside them at most: regions are whole pages.
  static int64_t most_rounding_bytes(int64_t total_bytes);
  // What regions of one block of so many bytes, or reserved ones of several (alignment included), are at most.
  static int64_t most_region_bytes(int64_t total_bytes);
  // Blocks of these sizes, whose memory is mapped but not prepared. Those that are dropped leave room that is reserved
  // for whoever allocates next. Throws MemoryBudgetError when they exceed the limit.
  std::vector<HostBlock> reserve(const std::vector<int64_t>& block_bytes);
  // Before the first use of a reserved block. Throws what preparing its region throws.
  void prepare(HostBlock& block);
  // What may still be reserved.
  int64_t unreserved_bytes() const { return budget_->unreserved_bytes(); }
  // What this arena may still hand out, if it fits into its regions.
  int64_t free_bytes() const { return mapped_bytes_ - used_bytes_ + reserved_bytes_ + unreserved_bytes(); }
  // Starts to prepare what is reserved.
  void prepare_ahead();
  // Whether regions are being prepared ahead right now.
  bool is_preparing() const;
  // Prepared regions that this arena gives back go there from now on, and not to the system.
  void keep_regions(std::shared_ptr<KeptRegions> kept) { keeper_ = std::move(kept); }
  // reserve() takes regions from there first, where they fit.
  void reuse_regions(std::shared_ptr<KeptRegions> kept) { reused_ = std::move(kept); }
  // What is left of them goes back to the system, beside whatever else runs.
  void release_reused();
  // Gives back reserved regions that were not needed and have no block.
  void release_reserved();

  HostBlock allocate(int64_t num_bytes);
  // An empty block instead of an error.
  HostBlock try_allocate(int64_t num_bytes);
  // The same out of memory that was never reserved.
  HostBlock try_allocate_unreserved(int64_t num_bytes);
  // The same, and an empty block also where memory would have to be prepared first.
  HostBlock try_allocate_prepared(int64_t num_bytes);
  // Gives regions without any block back to the system.
  void trim();

  int64_t limit_bytes() const { return budget_->limit_bytes; }
  int64_t used_bytes() const { return used_bytes_; }
  int64_t mapped_bytes() const { return mapped_bytes_; }
  int64_t peak_mapped_bytes() const { return peak_mapped_bytes_; }
  void reset_peak() { peak_mapped_bytes_ = mapped_bytes_; }

 private:
  friend class HostBlock;

  using FreeRanges = std::map<int64_t, int64_t>;
  using FreeNode = FreeRanges::node_type;
  struct Region {
    enum class Origin : uint8_t { kReserved, kOnDemand };
    // What the arena's own thread has to do with it.
    struct Ahead {
      Event done;
      std::atomic<bool> is_prepared{false};  // to be read after `done`
      std::atomic<bool> is_taken{false};     // by that thread, or by another one that comes first
    };

    char* data = nullptr;
    int64_t num_bytes = 0;
    Origin origin = Origin::kOnDemand;
    bool prepared = false;
    int64_t touched = 0;               // bytes below were handed out before
    FreeRanges free;                   // offset -> size
    std::vector<FreeNode> free_nodes;  // for blocks that are not free yet: to free one allocates nothing
    std::shared_ptr<Ahead> ahead;      // null until asked for

    bool is_free() const { return free.size() == 1 && free.begin()->second == num_bytes; }
  };
  enum class Search : uint8_t { kPrepared, kPreparedOnDemand, kUnprepared };

  Region& add_region(int64_t num_bytes, Region::Origin origin);
  // Of the regions that are used again, one with room for `needed_bytes` that leaves no less than `spare_bytes` of the
  // budget beside them; null: there is none.
  Region* reuse_region(int64_t needed_bytes, int64_t spare_bytes);
  void prepare(Region& region);
  // Nothing is done ahead to the region afterwards. Whether it was prepared so.
  static bool finish_ahead(Region& region);
  // Takes over what the arena's own thread has prepared by now.
  void add_prepared();
  HostBlock find_block(int64_t num_bytes, Search search);
  HostBlock take(Region& region, FreeRanges::iterator range, int64_t num_bytes);
  static void put(Region& region, FreeNode node, int64_t offset, int64_t size);
  HostBlock allocate_in_new_region(int64_t num_bytes);
  Region& region_of(const void* data);
  void free(void* data, int64_t num_bytes) noexcept;
  void note_mapped(int64_t num_bytes);
  void note_reserved(int64_t num_bytes);
  void unmap(Region& region);
  void erase_unmapped();

  std::shared_ptr<HostBudget> budget_;
  RegionHooks hooks_;
  std::vector<std::unique_ptr<Region>> regions_;
  int64_t used_bytes_ = 0;
  int64_t mapped_bytes_ = 0;
  int64_t reserved_bytes_ = 0;
  int64_t peak_mapped_bytes_ = 0;
  std::shared_ptr<KeptRegions> keeper_;
  std::shared_ptr<KeptRegions> reused_;
  std::unique_ptr<WorkQueue> preparer_;
};

inline void HostBlock::reset() {
  if (data != nullptr) arena_->free(std::exchange(data, nullptr), std::exchange(num_bytes, 0));
}

}  // namespace patrickstar
