// Where every payload is. Bookkeeping only: the store moves no bytes and decides nothing.
//
// For each array of each chunk it holds the device slot and host block (if any), which of the two are
// valid, the events after which they may be read, and how many running operations hold the array. For each
// parameter it holds the state (chunk/state.h). Owned by the runtime, guarded by its lock.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "chunk/layout.h"
#include "chunk/param_storage.h"
#include "chunk/state.h"
#include "common/event.h"
#include "common/types.h"
#include "memory/host_arena.h"
#include "memory/slot_pool.h"

namespace patrickstar {

struct ArrayRecord {
  Slot slot;                // device memory, empty when the array is not there
  HostBlock block;          // host memory, empty when the array is not there
  bool on_device = false;   // the slot holds the current value (or will, after device_ready)
  bool on_host = false;     // the block holds the current value (or will, after host_ready)
  Event device_ready;       // complete when an upload into the slot is
  Event host_ready;         // complete when a download into the block is
  Event block_busy_until;   // complete when an upload out of the block is
  int holds = 0;            // running operations that use the slot; not evictable while > 0
  bool prefetched = false;  // uploaded ahead of its use, not used yet
  uint64_t last_use = 0;    // moment of the last use, for the order of eviction before there is a trace

  bool exists() const { return on_device || on_host; }
};

// An array that is not evicted while this lives, whatever is thrown.
class ScopedHold {
 public:
  explicit ScopedHold(ArrayRecord& array) : array_(&array) { ++array.holds; }
  ~ScopedHold() { release(); }
  ScopedHold(ScopedHold&& other) noexcept : array_(std::exchange(other.array_, nullptr)) {}
  ScopedHold(const ScopedHold&) = delete;
  ScopedHold& operator=(const ScopedHold&) = delete;
  ScopedHold& operator=(ScopedHold&&) = delete;

  // Before its end.
  void release() {
    if (array_ != nullptr) --std::exchange(array_, nullptr)->holds;
  }

 private:
  ArrayRecord* array_;
};

class ChunkStore {
 public:
  explicit ChunkStore(Layout layout, std::vector<std::string> param_names);

  const Layout& layout() const { return layout_; }
  // Layout::train. The chunk's optimizer states exist.
  void train(ChunkId chunk) { layout_.train(chunk); }
  ArrayRecord& array(ArrayId id) { return arrays_[static_cast<size_t>(id.index())]; }
  const ArrayRecord& array(ArrayId id) const { return arrays_[static_cast<size_t>(id.index())]; }
  // Chunks whose array of this kind has its value on the device.
  int num_on_device(ArrayKind kind) const;
  int num_arrays() const { return static_cast<int>(arrays_.size()); }
  int64_t num_bytes(ArrayId id) const { return layout_.num_bytes(id); }

  // The storage that the parameters of `chunk` share; empty until bound.
  ParamStorage& storage(ChunkId chunk) { return storages_[static_cast<size_t>(chunk)]; }

  State param_state(ParamId param) const { return param_states_[static_cast<size_t>(param)]; }
  // Throws StateError for a move that chunk/state.h does not allow.
  void move_param(ParamId param, State to);
  State chunk_state(ChunkId chunk) const { return counts_[static_cast<size_t>(chunk)].chunk_state(); }
  // All parameters of the chunk are past their backward (or were not used): their values are dead until the step.
  bool is_dead(ChunkId chunk) const;

  const std::string& param_name(ParamId param) const { return param_names_[static_cast<size_t>(param)]; }
  // "chunk 3 (transformer.h.0.attn.c_attn.weight and 11 more), param"
  std::string describe(ArrayId id) const;

 private:
  Layout layout_;
  std::vector<std::string> param_names_;
  std::vector<ArrayRecord> arrays_;
  std::vector<ParamStorage> storages_;
  std::vector<State> param_states_;
  std::vector<StateCounts> counts_;
};

}  // namespace patrickstar
