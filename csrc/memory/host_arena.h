// Host memory for chunk buffers, in place of malloc or cudaHostAlloc.
//
// Regions come from mmap and ask for huge pages, with which the CPU's Adam is 15 % faster. A region is pinned as a
// whole by RegionHooks::prepare: cudaHostRegister with a parallel first touch reaches 12 GB/s, cudaHostAlloc 3.3. A
// block lies in one region. Blocks are found best-fit and coalesce when freed.
//
// Preparing memory takes seconds per 50 GB, so prepare_ahead() does it on a thread of the arena. Pinning blocks kernel
// launches for 20 ms per GiB (benchmark/results/h200-pinning.txt). Regions are small, so that the launching thread's
// lead over the device hides each pause.
//
// Arenas of one process share one budget. A block returns to its arena, which must outlive it. Guarded by the runtime's
// lock.
//
//   HostArena arena(std::make_shared<HostBudget>(/*limit_bytes=*/8 << 30), {});
//   HostBuffer block = arena.allocate(1 << 20);   // throws MemoryBudgetError over the limit
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

// Owned memory of an arena, or null. The owner must not destroy it while anything uses its memory.
class HostBuffer {
 public:
  HostBuffer() = default;
  HostBuffer(HostArena& arena, void* data, int64_t num_bytes, bool zeroed, bool prepared)
      : data(data), num_bytes(num_bytes), zeroed(zeroed), prepared(prepared), arena_(&arena) {}
  ~HostBuffer() { reset(); }
  HostBuffer(HostBuffer&& other) noexcept { swap(other); }
  HostBuffer& operator=(HostBuffer&& other) noexcept {
    HostBuffer(std::move(other)).swap(*this);
    return *this;
  }
  HostBuffer(const HostBuffer&) = delete;
  HostBuffer& operator=(const HostBuffer&) = delete;

  explicit operator bool() const { return data != nullptr; }
  void reset();
  void swap(HostBuffer& other) noexcept {
    std::swap(data, other.data);
    std::swap(num_bytes, other.num_bytes);
    std::swap(zeroed, other.zeroed);
    std::swap(prepared, other.prepared);
    std::swap(arena_, other.arena_);
  }

  void* data = nullptr;
  int64_t num_bytes = 0;
  bool zeroed = false;    // fresh from the system
  bool prepared = false;  // HostArena::prepare

 private:
  HostArena* arena_ = nullptr;
};

// Memory that the arenas of a process may map together. Guarded by the lock of its users.
struct HostBudget {
  explicit HostBudget(int64_t limit_bytes) : limit_bytes(limit_bytes) {}

  // Bytes that may still be mapped or reserved.
  int64_t unreserved_bytes() const { return limit_bytes - mapped_bytes - reserved_bytes; }

  const int64_t limit_bytes;
  int64_t mapped_bytes = 0;
  int64_t reserved_bytes = 0;  // to be mapped
};

// Hooks of new and of unmapped regions; each may be empty. `place` is fast and runs before the first touch; `prepare`
// may take seconds. Any thread may call them. `dispose` may outlive its maker.
struct RegionHooks {
  std::function<void(void* data, int64_t num_bytes)> place;
  std::function<void(void* data, int64_t num_bytes)> prepare;
  std::function<void(void* data, int64_t num_bytes)> dispose;
};

// Prepared regions of one arena, kept for another. Regions that no arena takes are unmapped with this.
class KeptRegions : public std::enable_shared_from_this<KeptRegions> {
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
  // The first region within these sizes, or an empty one.
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
  // Pinning costs the same per GiB in pieces of any size (benchmark/results/h200-pinning.txt); small ones pause less.
  static constexpr int64_t kMaxRegionBytes = int64_t{256} << 20;

  HostArena(std::shared_ptr<HostBudget> budget, RegionHooks hooks);
  // All blocks must be gone.
  ~HostArena();
  HostArena(const HostArena&) = delete;
  HostArena& operator=(const HostArena&) = delete;

  // Most bytes that reserve() adds to `total_bytes` of blocks, since regions are whole pages.
  static int64_t most_rounding_bytes(int64_t total_bytes);
  // Most bytes of the region of one block, or of the regions of several reserved blocks (alignment included).
  static int64_t most_region_bytes(int64_t total_bytes);
  // Maps blocks of these sizes without preparing them. A reserved block has its place from the beginning, so other
  // allocations cannot fragment it away. Room of dropped blocks stays reserved for later allocations. Throws
  // MemoryBudgetError over the limit.
  std::vector<HostBuffer> reserve(const std::vector<int64_t>& block_bytes);
  // Required before the first use of a reserved block; waits if the arena's thread is preparing its region. Rethrows
  // RegionHooks::prepare.
  void prepare(HostBuffer& block);
  // Bytes that may still be reserved.
  int64_t unreserved_bytes() const { return budget_->unreserved_bytes(); }
  // Bytes that this arena may still hand out, fragmentation aside.
  int64_t free_bytes() const { return mapped_bytes_ - used_bytes_ + reserved_bytes_ + unreserved_bytes(); }
  // Prepares all reserved regions on the arena's thread. A region needed earlier is prepared by its user.
  void prepare_ahead();
  bool is_preparing() const;
  // From now on, prepared regions that this arena gives back go to `kept`.
  void keep_regions(std::shared_ptr<KeptRegions> kept) { keeper_ = std::move(kept); }
  // reserve() takes fitting regions from `kept` first.
  void reuse_regions(std::shared_ptr<KeptRegions> kept) { reused_ = std::move(kept); }
  // Unmaps the rest of reuse_regions()'s memory in the background.
  void release_reused();
  // Unmaps reserved regions that were never prepared and have no block.
  void release_reserved();

  HostBuffer allocate(int64_t num_bytes);
  // Returns an empty block instead of throwing.
  HostBuffer try_allocate(int64_t num_bytes);
  // The same, from memory that was never reserved.
  HostBuffer try_allocate_unreserved(int64_t num_bytes);
  // Like try_allocate(), but empty also if memory would have to be prepared first.
  HostBuffer try_allocate_prepared(int64_t num_bytes);
  // Unmaps prepared regions without blocks.
  void trim();

  int64_t limit_bytes() const { return budget_->limit_bytes; }
  int64_t used_bytes() const { return used_bytes_; }
  int64_t mapped_bytes() const { return mapped_bytes_; }
  int64_t peak_mapped_bytes() const { return peak_mapped_bytes_; }
  void reset_peak() { peak_mapped_bytes_ = mapped_bytes_; }

 private:
  friend class HostBuffer;

  using FreeRanges = std::map<int64_t, int64_t>;
  using FreeNode = FreeRanges::node_type;
  struct Region {
    enum class Origin : uint8_t { kReserved, kOnDemand };
    // State shared with the arena's thread.
    struct Ahead {
      Event done;
      std::atomic<bool> is_prepared{false};  // valid after `done`
      std::atomic<bool> is_taken{false};     // by that thread, or by one that came first
    };

    char* data = nullptr;
    int64_t num_bytes = 0;
    Origin origin = Origin::kOnDemand;
    bool prepared = false;
    int64_t touched = 0;               // bytes below this were handed out before
    FreeRanges free;                   // offset -> size
    std::vector<FreeNode> free_nodes;  // one per used block, so that freeing allocates nothing
    std::shared_ptr<Ahead> ahead;      // null until prepare_ahead()

    bool is_free() const { return free.size() == 1 && free.begin()->second == num_bytes; }
  };
  enum class Search : uint8_t { kPrepared, kPreparedOnDemand, kUnprepared };

  Region& add_region(int64_t num_bytes, Region::Origin origin);
  // Takes a reusable region with room for `needed_bytes`, if at least `spare_bytes` of the budget are left then; else
  // null.
  Region* reuse_region(int64_t needed_bytes, int64_t spare_bytes);
  void prepare(Region& region);
  // Ends preparation ahead of this region. True if it was prepared.
  static bool finish_ahead(Region& region);
  // Adopts regions that the arena's thread has prepared.
  void add_prepared();
  HostBuffer find_block(int64_t num_bytes, Search search);
  HostBuffer take(Region& region, FreeRanges::iterator range, int64_t num_bytes);
  static void put(Region& region, FreeNode node, int64_t offset, int64_t size);
  HostBuffer allocate_in_new_region(int64_t num_bytes);
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

inline void HostBuffer::reset() {
  if (data != nullptr) arena_->free(std::exchange(data, nullptr), std::exchange(num_bytes, 0));
}

}  // namespace patrickstar
