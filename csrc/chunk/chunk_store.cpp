#include "chunk/chunk_store.h"

#include <utility>

#include "common/check.h"
#include "torch_api/attached_torch.h"

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

ParamStorage::ParamStorage(void* storage, int64_t num_bytes, const std::string& absent_message) : storage_(storage) {
  torch_api().claim_storage(storage, num_bytes, absent_message.c_str());
}

ParamStorage::~ParamStorage() {
  if (storage_ != nullptr) torch_api().release_storage(storage_);
}

void ParamStorage::attach(void* data) { torch_api().attach_storage(storage_, data); }

void ParamStorage::detach() { torch_api().detach_storage(storage_); }

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
