#include "engine/access_tracker.h"

#include <algorithm>
#include <exception>
#include <iterator>
#include <utility>

#include "common/check.h"
#include "common/reserve.h"

namespace patrickstar {

AccessTracker::AccessTracker(Pager& pager, GradientFlow& gradients, RankTurns& turns, const Step& step)
    : pager_(pager), store_(pager.store()), gradients_(gradients), turns_(turns), step_(step) {}

Tick AccessTracker::open_scope(const std::vector<ParamId>& params, HoldUntil until) {
  release_transient();
  std::vector<ParamId> held = params;
  reserve_one(scopes_);  // what is acquired has its holder, whatever fails
  acquire(params);
  const Tick begin = tick();
  if (until == HoldUntil::kNextEvent) transient_.swap(held);
  scopes_.push_back({begin, std::move(held), until});
  return begin;
}

void AccessTracker::close_scope() {
  PS_CHECK(!scopes_.empty(), StateError,
           "a module ended that had not begun; was a forward hook of PatrickStar removed?");
  release_transient();
  const Hold scope = std::move(scopes_.back());
  scopes_.pop_back();
  release(scope.params, forward_release_state());
}

Tick AccessTracker::touch(const std::vector<ParamId>& params) {
  if (!std::all_of(params.begin(), params.end(), [this](ParamId param) { return store_.uses(param) > 0; })) {
    acquire_in_turn(params);
    const bool transient = scopes_.empty() || scopes_.back().until == HoldUntil::kNextEvent;
    auto& holder = transient ? transient_ : scopes_.back().params;
    try {
      holder.insert(holder.end(), params.begin(), params.end());
    } catch (...) {
      release(params, forward_release_state());
      throw;
    }
  }
  return tick();
}

void AccessTracker::acquire_in_turn(const std::vector<ParamId>& params) {
  if (!scopes_.empty() || transient_.empty()) return acquire(params);
  try {
    acquire(params);
  } catch (const std::exception&) {  // no room
    release_transient();
    acquire(params);
  }
}

void AccessTracker::enter_backward(Tick begin, Tick end, const std::vector<ParamId>& params) {
  release_transient();
  Hold hold{begin, params, HoldUntil::kScopeEnd};
  reserve_one(backward_);
  const auto first_over =
      std::stable_partition(backward_.begin(), backward_.end(), [end](const Hold& held) { return held.begin <= end; });
  const std::vector<Hold> over(std::make_move_iterator(first_over), std::make_move_iterator(backward_.end()));
  backward_.erase(first_over, backward_.end());
  release(over);
  retire(over);
  acquire(params);
  backward_.push_back(std::move(hold));
}

void AccessTracker::release_all() {
  release_transient();
  while (!scopes_.empty()) close_scope();
  const std::vector<Hold> over = std::exchange(backward_, {});
  release(over);
  retire(over);
}

void AccessTracker::abandon_all() {
  release_transient();
  while (!scopes_.empty()) close_scope();
  release(std::exchange(backward_, {}));
}

void AccessTracker::release_transient() {
  if (!transient_.empty()) release(std::exchange(transient_, {}), forward_release_state());
}

State AccessTracker::forward_release_state() const { return step_.is_recorded() ? State::kHoldAfterFwd : State::kHold; }

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
  // Held before anything is brought in: making room for one must not evict another.
  for (ParamId param : params) {
    ++store_.uses(param);
    ++store_.array(value_of(param)).holds;
  }
  try {
    if (!all_held)
      bring(arrays);  // else their chunks are in use already: nothing moves, and it is no moment of its own
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
  const bool is_moment = step_.is_recorded();
  const Phase phase = step_.is(StepState::kBackward) ? Phase::kBackward : Phase::kForward;
  if (is_moment) turns_.follow_plan(phase, arrays);
  is_moment ? pager_.begin_moment(phase, arrays) : pager_.begin_untracked_use();
  const bool is_planned = is_moment && pager_.replays();
  for (ArrayId id : arrays) {
    if (!is_planned && pager_.needs_gather(id)) turns_.need(id.chunk);
    pager_.bring(id);
  }
  if (is_moment) pager_.settle_moment();
}

void AccessTracker::release(const std::vector<ParamId>& params, State to) {
  for (ParamId param : params) {
    --store_.array({store_.layout().placement(param).chunk, ArrayKind::kParam}).holds;
    if (--store_.uses(param) == 0) store_.move_param(param, to);
  }
}

void AccessTracker::release(const std::vector<Hold>& holds) {
  for (const Hold& hold : holds) release(hold.params, State::kHoldAfterBwd);
}

void AccessTracker::retire(const std::vector<Hold>& holds) {
  for (const Hold& hold : holds) {
    ChunkId last = -1;
    for (ParamId param : hold.params) {
      const ChunkId chunk = store_.layout().placement(param).chunk;
      if (chunk != std::exchange(last, chunk)) gradients_.retire_if_complete(chunk);
    }
  }
}

}  // namespace patrickstar
