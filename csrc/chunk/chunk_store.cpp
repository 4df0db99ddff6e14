#include "chunk/chunk_store.h"

#include <utility>

#include "common/check.h"

namespace patrickstar {

ChunkStore::ChunkStore(Layout layout, std::vector<std::string> param_names)
    : layout_(std::move(layout)),
      param_names_(std::move(param_names)),
      arrays_(static_cast<size_t>(layout_.num_chunks()) * kNumArrayKinds),
      storages_(static_cast<size_t>(layout_.num_chunks())),
      param_states_(static_cast<size_t>(layout_.num_params()), State::kFree) {
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

int ChunkStore::num_on_device(ArrayKind kind) const {
  int count = 0;
  for (ChunkId chunk = 0; chunk < layout().num_chunks(); ++chunk) count += array({chunk, kind}).on_device;
  return count;
}

}  // namespace patrickstar
