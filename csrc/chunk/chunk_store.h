// Where every payload is, in which state each parameter is, and the storage that a chunk's parameters share.
// Bookkeeping only: the store moves no bytes and decides nothing. Guarded by the runtime's lock.
//
// [Note: states] A chunked parameter is an ordinary nn.Parameter of its true shape. Its memory is a part of its chunk's
// storage, which is where the chunk's kParam array is just then, or refuses access ([Note: storage swap]).
//
//   state of a parameter   its value
//   FREE                   is nowhere in the compute dtype; it can be derived from the master
//   COMPUTE                is used by an open module or backward operation: its chunk stays on the device
//   HOLD                   is somewhere, and no use is open
//   HOLD_AFTER_FWD         the same, after its use in a forward
//   HOLD_AFTER_BWD         is dead until the optimizer has run, so the gradient may take its place
//
// A chunk's state is the highest of its parameters' in the order COMPUTE, HOLD, HOLD_AFTER_FWD, HOLD_AFTER_BWD, FREE;
// RELEASED is a chunk whose payload is on another rank. Legal moves stand in one table; an illegal one throws
// StateError.
//
//   an array of a chunk    slot, on_device   block, on_host
//   nowhere                -                 -
//   on the device          yes               -
//   on its way up          yes, device_ready yes
//   on both                yes               yes               dropped from either without a copy
//   on its way down        yes, busy         yes, host_ready
//   on the host            -                 yes
//   updated on the host    -                 yes, host_ready   by the queue of updates
//   on the disk            -                 -                 on_disk; a state that is at home there
//   passing through        -                 yes, on_disk      read from there, or written back (engine/disk_states.h)
//
// A running operation that uses the slot *holds* the array: it is not evicted then.
#pragma once

#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <array>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "chunk/layout.h"
#include "common/event.h"
#include "common/types.h"
#include "memory/host_arena.h"
#include "memory/slot_pool.h"

namespace patrickstar {

// [Note: states]
enum class State : uint8_t { kFree, kHoldAfterBwd, kHoldAfterFwd, kHold, kCompute, kReleased };
constexpr int kNumParamStates = 5;  // all but kReleased

const char* state_name(State state);

// Throws StateError when the table has no move from `from` to `to`. `subject` names the parameter.
void check_transition(State from, State to, const char* subject);

// Counts the parameters of one chunk by state.
class StateCounts {
 public:
  explicit StateCounts(int num_params) { counts_[static_cast<int>(State::kFree)] = num_params; }

  void move(State from, State to) {
    --counts_[static_cast<int>(from)];
    ++counts_[static_cast<int>(to)];
  }
  int count(State state) const { return counts_[static_cast<int>(state)]; }
  State chunk_state() const;

 private:
  std::array<int, kNumParamStates> counts_{};
};

// [Note: storage swap] Every `param.data` of a chunk, and every view autograd saved for backward, shares one storage at
// a fixed offset. Moving a chunk between slots changes one pointer and touches no Python object, and a saved view keeps
// no evicted memory alive. While the chunk is not on the device the storage refuses access with a message (a null
// pointer alone is not enough: several CPU kernels read it unchecked).
//
// The storage object is made by Python (an empty UntypedStorage) and handed over by address; this holds a reference.
class ParamStorage {
 public:
  ParamStorage() = default;
  // `storage` is the address of a live c10::StorageImpl. It becomes `num_bytes` long, without memory; views of it can
  // be made until the first detach(). `absent_message` is what an access while detached raises.
  ParamStorage(c10::StorageImpl* storage, int64_t num_bytes, const std::string& absent_message);

  explicit operator bool() const { return storage_.defined(); }
  void attach(void* data);
  void detach();

 private:
  c10::intrusive_ptr<c10::StorageImpl> storage_;
};

struct ArrayRecord {
  Slot slot;                // device memory, empty when the array is not there
  HostBlock block;          // host memory, empty when the array is not there
  bool on_device = false;   // the slot holds the current value (or will, after device_ready)
  bool on_host = false;     // the block holds the current value (or will, after host_ready)
  bool on_disk = false;     // so does the disk (or will; engine/disk_states.h)
  Event device_ready;       // complete when an upload into the slot is
  Event host_ready;         // complete when a download into the block, or an update of it, is
  Event block_busy_until;   // complete when an upload out of the block is
  int holds = 0;            // running operations that use the slot; not evictable while > 0
  bool prefetched = false;  // uploaded ahead of its use, not used yet
  uint64_t last_use = 0;    // moment of the last use, for the order of eviction before there is a trace

  bool exists() const { return on_device || on_host || on_disk; }
  // The value was written by compute, or on the host: it is the current one there, and nowhere else.
  void set_on_device() {
    on_device = true;
    on_host = false;
    on_disk = false;
  }
  void set_on_host() {
    on_host = true;
    on_device = false;
    on_disk = false;
  }
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
  ChunkStore(Layout layout, std::vector<std::string> param_names);

  const Layout& layout() const { return layout_; }
  const ChunkSpec& chunk(ChunkId chunk) const { return layout_.chunk(chunk); }
  int num_chunks() const { return layout_.num_chunks(); }
  // Layout::train. The chunk's optimizer states exist.
  void train(ChunkId chunk) { layout_.train(chunk); }
  ArrayRecord& array(ArrayId id) { return arrays_[static_cast<size_t>(id.index())]; }
  const ArrayRecord& array(ArrayId id) const { return arrays_[static_cast<size_t>(id.index())]; }
  int num_arrays() const { return static_cast<int>(arrays_.size()); }
  int64_t num_bytes(ArrayId id) const { return layout_.num_bytes(id); }
  // Where the chunk belongs between its uses: its optimizer states, and its compute value or gradient with them.
  Tier home(ChunkId chunk) const { return homes_[static_cast<size_t>(chunk)]; }
  void set_home(ChunkId chunk, Tier tier) { homes_[static_cast<size_t>(chunk)] = tier; }
  // What a chunk keeps beside its compute value (optimizer states, [Note: arrays of a parameter], or quantised values)
  // lies on one tier, and is on the device.
  bool has_states_on_device(ChunkId id) const { return array({id, chunk(id).leading_state()}).on_device; }

  // The storage that the parameters of `chunk` share; empty until bound.
  ParamStorage& storage(ChunkId chunk) { return storages_[static_cast<size_t>(chunk)]; }

  State param_state(ParamId param) const { return param_states_[static_cast<size_t>(param)]; }
  // Throws StateError for a move that [Note: states] does not allow.
  void move_param(ParamId param, State to);
  State chunk_state(ChunkId chunk) const { return counts_[static_cast<size_t>(chunk)].chunk_state(); }
  // All parameters of the chunk are past their backward (or were not used): their values are dead until the step.
  bool is_dead(ChunkId chunk) const;

  // How many running uses hold the parameter.
  int& uses(ParamId param) { return uses_[static_cast<size_t>(param)]; }

  const std::string& param_name(ParamId param) const { return param_names_[static_cast<size_t>(param)]; }
  // "chunk 3 (transformer.h.0.attn.c_attn.weight and 11 more), param"
  std::string describe(ArrayId id) const;

 private:
  Layout layout_;
  std::vector<std::string> param_names_;
  std::vector<ArrayRecord> arrays_;
  std::vector<ParamStorage> storages_;
  std::vector<State> param_states_;
  std::vector<int> uses_;  // by parameter
  std::vector<StateCounts> counts_;
  std::vector<Tier> homes_;
};

}  // namespace patrickstar
