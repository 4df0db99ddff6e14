#include "chunk/chunk_store.h"

#include <utility>

#include "common/check.h"

namespace patrickstar {

namespace {

constexpr bool kMayMove[kNumParamStates][kNumParamStates] = {
    // to: FREE  AFTER_BWD  AFTER_FWD  HOLD   COMPUTE        from:
    {false, true, false, true, true},  // FREE: an unused parameter's backward ends; the optimizer writes it; it is used
    {true, true, false, true,
     true},  // HOLD_AFTER_BWD: dropped for the gradient; a second gradient; step; next micro-batch
    {true, true, true, true, true},   // HOLD_AFTER_FWD: dropped (derivable); end of backward; used again
    {true, true, false, true, true},  // HOLD
    {false, true, true, true, true},  // COMPUTE: nested uses; never dropped while in use
};

// PyTorch can make a StorageImpl refuse access with a message (used for fake tensors), but has no public way back
// before 2.13. An explicit instantiation may name a private member; this one reaches the flag in every version since
// 2.6.
bool& refuses_access(c10::StorageImpl& storage);

template <bool c10::StorageImpl::* Member>
struct FlagAccess {
  friend bool& refuses_access(c10::StorageImpl& storage) { return storage.*Member; }
};
template struct FlagAccess<&c10::StorageImpl::throw_on_immutable_data_ptr_>;

// No deleter: the memory belongs to the pool of device buffers, and the storage cannot be resized.
c10::DataPtr borrowed(void* data, c10::Device device) { return {data, device}; }

}  // namespace

const char* state_name(State state) {
  switch (state) {
    case State::kFree:
      return "FREE";
    case State::kHoldAfterBwd:
      return "HOLD_AFTER_BWD";
    case State::kHoldAfterFwd:
      return "HOLD_AFTER_FWD";
    case State::kHold:
      return "HOLD";
    case State::kCompute:
      return "COMPUTE";
    case State::kReleased:
      return "RELEASED";
  }
  return "?";
}

void check_transition(State from, State to, const char* subject) {
  const bool known = from != State::kReleased && to != State::kReleased;
  PS_CHECK(known && kMayMove[static_cast<int>(from)][static_cast<int>(to)], StateError, subject, " cannot go from ",
           state_name(from), " to ", state_name(to), "; this is a defect of PatrickStar, please report it");
}

State StateCounts::chunk_state() const {
  for (State state : {State::kCompute, State::kHold, State::kHoldAfterFwd, State::kHoldAfterBwd}) {
    if (count(state) > 0) return state;
  }
  return State::kFree;
}

ParamStorage::ParamStorage(c10::StorageImpl* storage, int64_t num_bytes, const std::string& absent_message)
    : storage_(c10::intrusive_ptr<c10::StorageImpl>::unsafe_reclaim_from_nonowning(storage)) {
  storage_->set_nbytes(num_bytes);
  storage_->release_data_and_set_meta_custom_data_ptr_error_msg_(absent_message);
  attach(nullptr);
}

void ParamStorage::attach(void* data) {
  refuses_access(*storage_) = false;
  storage_->set_data_ptr_noswap(borrowed(data, storage_->device()));
}

void ParamStorage::detach() {
  const c10::Device device = storage_->device();
  refuses_access(*storage_) = true;
  storage_->set_data_ptr_noswap(borrowed(nullptr, device));  // also refreshes the check of mutable access
}

ChunkStore::ChunkStore(Layout layout, std::vector<std::string> param_names)
    : layout_(std::move(layout)),
      param_names_(std::move(param_names)),
      arrays_(static_cast<size_t>(layout_.num_chunks()) * kNumArrayKinds),
      storages_(static_cast<size_t>(layout_.num_chunks())),
      param_states_(static_cast<size_t>(layout_.num_params()), State::kFree),
      uses_(param_states_.size(), 0),
      resting_tiers_(static_cast<size_t>(layout_.num_chunks()), Tier::kHost) {
  PS_CHECK(param_names_.size() == param_states_.size(), ArgumentError, param_names_.size(), " names for ",
           param_states_.size(), " parameters");
  for (const ChunkSpec& chunk : layout_.chunks()) counts_.emplace_back(static_cast<int>(chunk.params.size()));
}

void ChunkStore::move_param(ParamId param, State to) {
  State& state = param_states_[static_cast<size_t>(param)];
  if (state == to) return;
  check_transition(state, to, param_name(param).c_str());
  counts_[static_cast<size_t>(layout_.placement(param).chunk)].move(state, to);
  state = to;
}

bool ChunkStore::is_dead(ChunkId chunk) const {
  const State state = chunk_state(chunk);
  return state == State::kHoldAfterBwd || state == State::kFree;
}

std::string ChunkStore::describe(ArrayId id) const {
  const ChunkSpec& chunk = layout_.chunk(id.chunk);
  std::string text = detail::join("chunk ", id.chunk, " (", param_name(chunk.params.front()));
  if (chunk.params.size() > 1) text += detail::join(" and ", chunk.params.size() - 1, " more");
  return text + "), " + array_kind_name(id.kind);
}

}  // namespace patrickstar
