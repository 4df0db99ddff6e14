#include "engine/update_arrays.h"

#include <algorithm>
#include <utility>

namespace patrickstar {

UpdateArrays::UpdateArrays(Pager& pager, Speculation& speculation)
    : pager_(pager), memory_(pager.memory()), store_(pager.store()), speculation_(speculation) {}

bool UpdateArrays::has_states(ChunkId chunk, Tier tier) const {
  const StateKinds kinds = store_.chunk(chunk).state_kinds();
  return std::all_of(kinds.begin(), kinds.end(), [&](ArrayKind kind) {
    const ArrayRecord& state = memory_.array({chunk, kind});
    return tier == Tier::kDevice ? state.on_device : state.exists() && !state.on_device;
  });
}

bool UpdateArrays::belongs_on_device(ChunkId chunk) const {
  const StateKinds kinds = store_.chunk(chunk).state_kinds();
  return std::any_of(kinds.begin(), kinds.end(), [&](ArrayKind kind) {
    const ArrayRecord& state = memory_.array({chunk, kind});
    return state.on_device || (!state.exists() && store_.resting_tier(chunk) == Tier::kDevice);
  });
}

void UpdateArrays::make_states(ChunkId chunk) {
  const Tier tier = belongs_on_device(chunk) ? Tier::kDevice : Tier::kHost;
  for (ArrayKind kind : store_.chunk(chunk).state_kinds()) pager_.ensure_state({chunk, kind}, tier);
}

void UpdateArrays::await_states(ChunkId chunk, std::vector<Event>& events) const {
  for (ArrayKind kind : store_.chunk(chunk).state_kinds()) events.push_back(memory_.array({chunk, kind}).host_ready);
}

void UpdateArrays::set_states_ready(ChunkId chunk, const Event& done) {
  for (ArrayKind kind : store_.chunk(chunk).state_kinds()) memory_.array({chunk, kind}).host_ready = done;
}

void UpdateArrays::bring_value_to_host(ChunkId chunk, std::vector<Event>& events) {
  const ArrayId id = param_of(chunk);
  ArrayRecord& param = memory_.array(id);
  if (!param.on_host) pager_.bring_to_host(id);
  events.push_back(param.host_ready);
  events.push_back(param.host_buffer_busy_until);
}

void UpdateArrays::discard_values(ChunkId chunk) {
  memory_.discard(param_of(chunk));
  if (store_.chunk(chunk).is_sharded()) memory_.discard({chunk, ArrayKind::kParam});
}

void UpdateArrays::note_new_values(ChunkId chunk) {
  const bool whole = memory_.array({chunk, ArrayKind::kParam}).exists();
  for (ParamId id : store_.chunk(chunk).params) {
    if (whole || store_.param_state(id) != State::kFree) {
      store_.move_param(id, whole ? State::kHold : State::kFree);
    }
  }
}

HostBuffer UpdateArrays::take_gradient(ChunkId chunk) {
  ArrayRecord& grad = memory_.array(grad_of(chunk));
  grad.host_ready = nullptr;
  grad.on_host = false;
  return std::exchange(grad.block, {});
}

void UpdateArrays::leave_gradient(ChunkId chunk, const Event& done) {
  if (!has_gradient_place(chunk)) return speculation_.free_after(take_gradient(chunk), done);
  ArrayRecord& grad = memory_.array(grad_of(chunk));
  grad.on_host = false;
  grad.host_ready = nullptr;
  grad.host_buffer_busy_until = done;
}

}  // namespace patrickstar
