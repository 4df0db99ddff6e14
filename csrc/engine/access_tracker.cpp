#include "engine/access_tracker.h"

#include <algorithm>
#include <utility>

namespace patrickstar {

AccessTracker::AccessTracker(Pager& pager, GradientFlow& gradients, RankTurns& turns, const Step& step)
    : pager_(pager), store_(pager.store()), gradients_(gradients), turns_(turns), step_(step) {}

void AccessTracker::acquire(const std::vector<ParamId>& params) {
  if (params.empty()) return;
  const auto value_of = [this](ParamId param) -> ArrayId {
    return {store_.layout().placement(param).chunk, ArrayKind::kParam};
  };
  std::vector<ArrayId> arrays;
  bool all_held = true;
  for (ParamId param : params) {
    arrays.push_back(value_of(param));
    all_held = all_held && store_.array(arrays.back()).holds > 0;
  }
  std::sort(arrays.begin(), arrays.end());
  arrays.erase(std::unique(arrays.begin(), arrays.end()), arrays.end());
  // All arrays are held first: making room for one must not evict another.
  for (ParamId param : params) {
    ++store_.uses(param);
    ++store_.array(value_of(param)).holds;
  }
  try {
    if (!all_held) bring(arrays);  // if all are held already, nothing moves and no access is recorded
  } catch (...) {
    for (ParamId param : params) {
      --store_.uses(param);
      --store_.array(value_of(param)).holds;
    }
    throw;
  }
  for (ParamId param : params) store_.move_param(param, State::kCompute);
}

void AccessTracker::bring(const std::vector<ArrayId>& arrays) {
  const bool is_access = step_.is_recorded();
  const Phase phase = step_.is(StepState::kBackward) ? Phase::kBackward : Phase::kForward;
  if (is_access) turns_.follow_plan(phase, arrays);
  is_access ? pager_.begin_access(phase, arrays) : pager_.begin_untracked_use();
  const bool is_planned = is_access && pager_.replays();
  for (ArrayId id : arrays) {
    if (!is_planned && pager_.needs_gather(id)) turns_.need(id.chunk);
    pager_.bring(id);
  }
  if (is_access) pager_.settle_access();
}

void AccessTracker::release(const std::vector<ParamId>& params, Phase phase) {
  const State after_forward = step_.is_recorded() ? State::kHoldAfterFwd : State::kHold;
  const State to = phase == Phase::kForward ? after_forward : State::kHoldAfterBwd;
  for (ParamId param : params) {
    --store_.array({store_.layout().placement(param).chunk, ArrayKind::kParam}).holds;
    if (--store_.uses(param) == 0) store_.move_param(param, to);
  }
}

void AccessTracker::finalise(const std::vector<ParamId>& params) {
  ChunkId last = -1;
  for (ParamId param : params) {
    const ChunkId chunk = store_.layout().placement(param).chunk;
    if (chunk != std::exchange(last, chunk)) gradients_.finalise_if_complete(chunk);
  }
}

}  // namespace patrickstar
