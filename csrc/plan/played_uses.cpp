#include "plan/played_uses.h"

#include <algorithm>
#include <set>
#include <utility>

namespace patrickstar {

namespace {

class UsePlayer final : public UseHolds {
 public:
  UsePlayer(const Layout& layout, const std::vector<uint8_t>& states_on_device, const std::vector<ParamUse>& uses);

  PlayedUses play(const std::vector<ParamUse>& uses);

 protected:
  void acquire(const std::vector<ParamId>& params) override;
  void release(const std::vector<ParamId>& params, Phase phase) override;
  void retire(const std::vector<ParamId>& params) override;
  bool is_in_use(ParamId param) const override { return num_uses_[static_cast<size_t>(param)] > 0; }

 private:
  struct ChunkState {
    bool leaves = false;  // its gradient, when it is complete
    bool has_gradient = false;
    bool is_retired = false;
    int num_holds = 0;
    int folds_left = 0;
    int num_alive = 0;  // parameters whose values are still of use
  };

  void play(const ParamUse& use);
  void fold(ParamId param);
  void retire_if_complete(ChunkId id);
  void retire(ChunkId id);
  void set_alive(ParamId param, bool is_alive);
  void add(const Access& access);
  // With the gap that aligns the next parameter of the chunk.
  int64_t param_bytes(ParamId param) const;

  ChunkId chunk_of(ParamId param) const { return layout_.placement(param).chunk; }
  ChunkState& chunk(ChunkId id) { return chunks_[static_cast<size_t>(id)]; }

  const Layout& layout_;
  std::vector<ChunkState> chunks_;
  std::vector<int> num_uses_;      // by parameter
  std::vector<uint8_t> is_alive_;  // by parameter
  Phase phase_ = Phase::kForward;
  PlayedUses played_;
};

UsePlayer::UsePlayer(const Layout& layout, const std::vector<uint8_t>& states_on_device,
                     const std::vector<ParamUse>& uses)
    : layout_(layout),
      chunks_(static_cast<size_t>(layout.num_chunks())),
      num_uses_(static_cast<size_t>(layout.num_params()), 0),
      is_alive_(static_cast<size_t>(layout.num_params()), 1) {
  for (ChunkId id = 0; id < layout.num_chunks(); ++id) {
    const ChunkSpec& spec = layout.chunk(id);
    const bool ends_at_once = spec.keeps_param() && spec.states.gradient == GradientPlace::kOfParam;
    chunk(id).leaves = spec.is_sharded() || states_on_device[static_cast<size_t>(id)] == 0 || ends_at_once;
    chunk(id).num_alive = static_cast<int>(spec.params.size());
  }
  for (const ParamUse& use : uses) {
    if (use.call == UseCall::kFold) ++chunk(chunk_of(use.params.front())).folds_left;
  }
}

PlayedUses UsePlayer::play(const std::vector<ParamUse>& uses) {
  for (const ParamUse& use : uses) {
    play(use);
    played_.moment_of.push_back(static_cast<int64_t>(played_.timeline.moments.size()) - 1);
  }
  release_all();
  for (ChunkId id = 0; id < layout_.num_chunks(); ++id) {
    if (chunk(id).has_gradient) retire(id);
  }
  return std::move(played_);
}

void UsePlayer::play(const ParamUse& use) {
  switch (use.call) {
    case UseCall::kOpenScope:
      open_scope(use.params, use.until);
      break;
    case UseCall::kCloseScope:
      close_scope();
      break;
    case UseCall::kTouch:
      touch(use.params);
      break;
    case UseCall::kEndForward:
      release_transient();
      phase_ = Phase::kBackward;
      break;
    case UseCall::kEnterBackward:
      enter_backward(use.begin, use.end, use.params);
      break;
    case UseCall::kFold:
      fold(use.params.front());
      break;
  }
}

void UsePlayer::acquire(const std::vector<ParamId>& params) {
  if (params.empty()) return;
  const std::set<ParamId> asked(params.begin(), params.end());
  std::set<ChunkId> held;
  for (ParamId param : params) held.insert(chunk_of(param));
  const bool all_held = std::all_of(held.begin(), held.end(), [this](ChunkId id) { return chunk(id).num_holds > 0; });
  for (ParamId param : params) {
    ++num_uses_[static_cast<size_t>(param)];
    ++chunk(chunk_of(param)).num_holds;
    set_alive(param, true);
  }
  if (all_held) return;
  Moment moment;
  moment.phase = phase_;
  int64_t waste = 0;
  for (ChunkId id : held) {
    moment.accesses.push_back({{id, ArrayKind::kParam}, AccessMode::kRead});
    waste += layout_.chunk(id).numel * element_size(layout_.chunk(id).dtype);
  }
  for (ParamId param : asked) waste -= param_bytes(param);
  played_.waste_bytes = std::max(played_.waste_bytes, waste);
  played_.timeline.moments.push_back(std::move(moment));
}

void UsePlayer::release(const std::vector<ParamId>& params, Phase phase) {
  for (ParamId param : params) {
    --chunk(chunk_of(param)).num_holds;
    const bool is_over = --num_uses_[static_cast<size_t>(param)] == 0;
    if (is_over && phase == Phase::kBackward) set_alive(param, false);
  }
}

void UsePlayer::retire(const std::vector<ParamId>& params) {
  for (ParamId param : params) retire_if_complete(chunk_of(param));
}

void UsePlayer::fold(ParamId param) {
  const ChunkId id = chunk_of(param);
  chunk(id).has_gradient = true;
  --chunk(id).folds_left;
  add({{id, ArrayKind::kGrad}, AccessMode::kWrite});
  if (!is_in_use(param)) set_alive(param, false);
  retire_if_complete(id);
}

void UsePlayer::retire_if_complete(ChunkId id) {
  const ChunkState& state = chunk(id);
  if (state.has_gradient && state.folds_left == 0 && state.num_alive == 0) retire(id);
}

void UsePlayer::retire(ChunkId id) {
  if (std::exchange(chunk(id).is_retired, true)) return;
  if (chunk(id).leaves) add({{id, ArrayKind::kGrad}, AccessMode::kRetire});
}

void UsePlayer::set_alive(ParamId param, bool is_alive) {
  uint8_t& state = is_alive_[static_cast<size_t>(param)];
  if ((state != 0) == is_alive) return;
  state = is_alive ? 1 : 0;
  chunk(chunk_of(param)).num_alive += is_alive ? 1 : -1;
}

void UsePlayer::add(const Access& access) {
  if (played_.timeline.moments.empty()) return;
  auto& accesses = played_.timeline.moments.back().accesses;
  const bool is_known = std::any_of(accesses.begin(), accesses.end(), [&access](const Access& other) {
    return other.array == access.array && other.mode == access.mode;
  });
  if (!is_known) accesses.push_back(access);
}

int64_t UsePlayer::param_bytes(ParamId param) const {
  const ChunkSpec& spec = layout_.chunk(chunk_of(param));
  const auto next = std::find(spec.params.begin(), spec.params.end(), param) + 1;
  const int64_t end = next == spec.params.end() ? spec.numel : layout_.placement(*next).offset;
  return (end - layout_.placement(param).offset) * element_size(spec.dtype);
}

}  // namespace

PlayedUses play_uses(const Layout& layout, const std::vector<uint8_t>& states_on_device,
                     const std::vector<ParamUse>& uses) {
  return UsePlayer(layout, states_on_device, uses).play(uses);
}

}  // namespace patrickstar
