// Where every chunk buffer is, the state of every parameter, and the storage that a chunk's parameters share.
// Bookkeeping only: the store moves no bytes and decides nothing. Guarded by the runtime's lock.
//
// An array of a chunk is in one of these places:
//
//   place                  device buffer, on_device   block, on_host
//   nowhere                -                 -
//   device                 yes               -
//   uploading              yes, device_ready yes
//   both                   yes               yes               either may be dropped without a copy
//   downloading            yes, busy         yes, host_ready
//   host                   -                 yes
//   updated on the host    -                 yes, host_ready   by the update queue
//   disk                   -                 -                 on_disk; a state that rests there
//   disk in transit        -                 yes, on_disk      read or written back (engine/disk_states.h)
//
// A running operation that uses the device buffer *holds* the array, which prevents eviction.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "chunk/layout.h"
#include "common/event.h"
#include "common/types.h"
#include "memory/device_buffer_pool.h"
#include "memory/host_arena.h"

namespace patrickstar {

// State of a parameter. A chunked parameter is an ordinary nn.Parameter of its true shape. Its memory is part of the
// chunk's storage, which points at the chunk's kParam array or refuses access (see ParamStorage).
//
//   FREE                   no value in the compute dtype; it can be made from the master
//   COMPUTE                used by an open module or backward operation; the chunk stays on the device
//   HOLD                   has a value, not in use
//   HOLD_AFTER_FWD         the same, after its use in a forward
//   HOLD_AFTER_BWD         not needed until the optimizer has run; the gradient may take its place
//
// A chunk has the highest state of its parameters, in the order COMPUTE, HOLD, HOLD_AFTER_FWD, HOLD_AFTER_BWD, FREE.
// RELEASED: the chunk's buffer is on another rank.
enum class State : uint8_t { kFree, kHoldAfterBwd, kHoldAfterFwd, kHold, kCompute, kReleased };
constexpr int kNumParamStates = 5;  // all but kReleased

const char* state_name(State state);

// Throws StateError for a forbidden transition. `subject` names the parameter.
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

// The storage of a chunk. Every `param.data` of the chunk and every view that autograd saved lies in it at a fixed
// offset. Moving the chunk changes one pointer, touches no Python object, and saved views keep no evicted memory alive.
// While the chunk is off the device the storage refuses access with a message; a null pointer alone is not enough,
// since several CPU kernels read it unchecked.
//
// Python makes the storage (an empty UntypedStorage) and passes its address; this holds a reference.
class ParamStorage {
 public:
  ParamStorage() = default;
  // `storage`: a live c10::StorageImpl. It becomes `num_bytes` long, without memory; views can be made until
  // the first detach(). Access while detached raises `absent_message`.
  ParamStorage(void* storage, int64_t num_bytes, const std::string& absent_message);
  ~ParamStorage();
  ParamStorage(ParamStorage&& other) noexcept : storage_(std::exchange(other.storage_, nullptr)) {}
  ParamStorage& operator=(ParamStorage&& other) noexcept {
    std::swap(storage_, other.storage_);
    return *this;
  }

  explicit operator bool() const { return storage_ != nullptr; }
  void attach(void* data);
  void detach();

 private:
  void* storage_ = nullptr;
};

struct ArrayRecord {
  DeviceBuffer device_buffer;    // device memory, or empty
  HostBuffer block;              // host memory, or empty
  bool on_device = false;        // the device buffer has the current value, after device_ready
  bool on_host = false;          // the host buffer has the current value, after host_ready
  bool on_disk = false;          // the disk has the current value (engine/disk_states.h)
  Event device_ready;            // end of the upload
  Event host_ready;              // end of the download, or of the host update
  Event host_buffer_busy_until;  // end of the upload that reads the host buffer
  int holds = 0;                 // running operations that use the device buffer; > 0 prevents eviction
  bool prefetched = false;       // uploaded ahead and not used yet
  uint64_t last_use = 0;         // access that used it last; eviction order before the first trace

  bool exists() const { return on_device || on_host || on_disk; }
  // The only current value is on that tier now.
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

// Prevents eviction of an array while it lives.
class ScopedHold {
 public:
  explicit ScopedHold(ArrayRecord& array) : array_(&array) { ++array.holds; }
  ~ScopedHold() { release(); }
  ScopedHold(ScopedHold&& other) noexcept : array_(std::exchange(other.array_, nullptr)) {}
  ScopedHold(const ScopedHold&) = delete;
  ScopedHold& operator=(const ScopedHold&) = delete;
  ScopedHold& operator=(ScopedHold&&) = delete;

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
  // Like Layout::train(). The optimizer states must exist.
  void train(ChunkId chunk) { layout_.train(chunk); }
  ArrayRecord& array(ArrayId id) { return arrays_[static_cast<size_t>(id.index())]; }
  const ArrayRecord& array(ArrayId id) const { return arrays_[static_cast<size_t>(id.index())]; }
  int num_arrays() const { return static_cast<int>(arrays_.size()); }
  int64_t num_bytes(ArrayId id) const { return layout_.num_bytes(id); }
  // Resting tier of the chunk's optimizer states and of the compute value or gradient beside them.
  Tier resting_tier(ChunkId chunk) const { return resting_tiers_[static_cast<size_t>(chunk)]; }
  void set_resting_tier(ChunkId chunk, Tier tier) { resting_tiers_[static_cast<size_t>(chunk)] = tier; }
  // Optimizer states (or quantised values) lie on one tier; true if that is the device.
  bool has_states_on_device(ChunkId id) const { return array({id, chunk(id).leading_state()}).on_device; }

  // Empty until bound.
  ParamStorage& storage(ChunkId chunk) { return storages_[static_cast<size_t>(chunk)]; }

  State param_state(ParamId param) const { return param_states_[static_cast<size_t>(param)]; }
  // Throws StateError for a forbidden transition.
  void move_param(ParamId param, State to);
  State chunk_state(ChunkId chunk) const { return counts_[static_cast<size_t>(chunk)].chunk_state(); }
  // True if no parameter is needed before the next update: each is past its backward, or was not used.
  bool is_dead(ChunkId chunk) const;

  // Running uses that hold the parameter.
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
  std::vector<Tier> resting_tiers_;
};

}  // namespace patrickstar
