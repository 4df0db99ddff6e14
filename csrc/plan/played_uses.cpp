#include "plan/played_uses.h"

#include <algorithm>
#include <set>
#include <utility>

#include "trace/recorder.h"

namespace patrickstar {

namespace {

class UsePlayer final : public UseHolds {
 public:
  UsePlayer(const Layout& layout, const std::vector<uint8_t>& states_on_device, const std::vector<ParamUse>& uses);

  PlayedUses play(const std::vector<ParamUse>& uses);

 protected:
  void acquire(const std::vector<ParamId>& params) override;
  void release(const std::vector<ParamId>& params, Phase phase) override;
  void finalise(const std::vector<ParamId>& params) override;
  bool is_in_use(ParamId param) const override { return num_uses_[static_cast<size_t>(param)] > 0; }

 private:
  struct ChunkState {
    bool leaves = false;  // its gradient leaves the device when complete
    bool has_gradient = false;
    bool is_finalised = false;
    int num_holds = 0;
    int accumulations_left = 0;
    int num_alive = 0;  // parameters whose values are still needed
  };

  void play(const ParamUse& use);
  void accumulate(ParamId param);
  void finalise_if_complete(ChunkId id);
  void finalise(ChunkId id);
  void set_alive(ParamId param, bool is_alive);

  ChunkId chunk_of(ParamId param) const { return layout_.placement(param).chunk; }
  ChunkState& chunk(ChunkId id) { return chunks_[static_cast<size_t>(id)]; }

  const Layout& layout_;
  std::vector<ChunkState> chunks_;
  std::vector<int> num_uses_;      // by parameter
  std::vector<uint8_t> is_alive_;  // by parameter
  std::vector<int64_t> bytes_;     // by parameter, alignment gap behind it included
  Recorder recorder_;
  Phase phase_ = Phase::kForward;
  PlayedUses played_;
};

UsePlayer::UsePlayer(const Layout& layout, const std::vector<uint8_t>& states_on_device,
                     const std::vector<ParamUse>& uses)
    : layout_(layout),
      chunks_(static_cast<size_t>(layout.num_chunks())),
      num_uses_(static_cast<size_t>(layout.num_params()), 0),
      is_alive_(static_cast<size_t>(layout.num_params()), 1),
      bytes_(static_cast<size_t>(layout.num_params()), 0) {
  for (ChunkId id = 0; id < layout.num_chunks(); ++id) {
    const ChunkSpec& spec = layout.chunk(id);
    const bool ends_at_once = spec.keeps_param() && spec.states.gradient == GradientPlace::kOfParam;
    chunk(id).leaves = spec.is_sharded() || states_on_device[static_cast<size_t>(id)] == 0 || ends_at_once;
    chunk(id).num_alive = static_cast<int>(spec.params.size());
    int64_t end = spec.numel;
    for (auto param = spec.params.rbegin(); param != spec.params.rend(); ++param) {
      const int64_t begin = layout.placement(*param).offset;
      bytes_[static_cast<size_t>(*param)] = (end - begin) * element_size(spec.dtype);
      end = begin;
    }
  }
  for (const ParamUse& use : uses) {
    if (use.call == UseCall::kAccumulate) ++chunk(chunk_of(use.params.front())).accumulations_left;
  }
}

PlayedUses UsePlayer::play(const std::vector<ParamUse>& uses) {
  for (const ParamUse& use : uses) {
    play(use);
    played_.access_of.push_back(recorder_.position());
  }
  release_all();
  for (ChunkId id = 0; id < layout_.num_chunks(); ++id) {
    if (chunk(id).has_gradient) finalise(id);
  }
  played_.timeline = recorder_.running();
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
    case UseCall::kAccumulate:
      accumulate(use.params.front());
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
  std::vector<ArrayId> acquired;
  int64_t waste = 0;
  for (ChunkId id : held) {
    acquired.push_back({id, ArrayKind::kParam});
    waste += layout_.num_bytes(acquired.back());
  }
  for (ParamId param : asked) waste -= bytes_[static_cast<size_t>(param)];
  played_.waste_bytes = std::max(played_.waste_bytes, waste);
  recorder_.begin_access(phase_, std::move(acquired), /*activation_peak=*/0);
}

void UsePlayer::release(const std::vector<ParamId>& params, Phase phase) {
  for (ParamId param : params) {
    --chunk(chunk_of(param)).num_holds;
    const bool is_over = --num_uses_[static_cast<size_t>(param)] == 0;
    if (is_over && phase == Phase::kBackward) set_alive(param, false);
  }
}

void UsePlayer::finalise(const std::vector<ParamId>& params) {
  for (ParamId param : params) finalise_if_complete(chunk_of(param));
}

void UsePlayer::accumulate(ParamId param) {
  const ChunkId id = chunk_of(param);
  chunk(id).has_gradient = true;
  --chunk(id).accumulations_left;
  recorder_.add({{id, ArrayKind::kGrad}, ArrayUseMode::kWrite});
  if (!is_in_use(param)) set_alive(param, false);
  finalise_if_complete(id);
}

void UsePlayer::finalise_if_complete(ChunkId id) {
  const ChunkState& state = chunk(id);
  if (state.has_gradient && state.accumulations_left == 0 && state.num_alive == 0) finalise(id);
}

void UsePlayer::finalise(ChunkId id) {
  if (std::exchange(chunk(id).is_finalised, true)) return;
  if (chunk(id).leaves) recorder_.add({{id, ArrayKind::kGrad}, ArrayUseMode::kFinalise});
}

void UsePlayer::set_alive(ParamId param, bool is_alive) {
  uint8_t& state = is_alive_[static_cast<size_t>(param)];
  if ((state != 0) == is_alive) return;
  state = is_alive ? 1 : 0;
  chunk(chunk_of(param)).num_alive += is_alive ? 1 : -1;
}

}  // namespace

PlayedUses play_uses(const Layout& layout, const std::vector<uint8_t>& states_on_device,
                     const std::vector<ParamUse>& uses) {
  return UsePlayer(layout, states_on_device, uses).play(uses);
}

}  // namespace patrickstar
