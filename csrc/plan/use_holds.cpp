#include "plan/use_holds.h"

#include <algorithm>
#include <exception>
#include <iterator>
#include <utility>

#include "common/check.h"
#include "common/reserve.h"

namespace patrickstar {

Tick UseHolds::open_scope(const std::vector<ParamId>& params, HoldUntil until) {
  release_transient();
  std::vector<ParamId> held = params;
  reserve_one(scopes_);  // after acquire() nothing may fail before the hold is recorded
  acquire(params);
  const Tick begin = tick();
  if (until == HoldUntil::kNextEvent) transient_.swap(held);
  scopes_.push_back({begin, std::move(held), until});
  return begin;
}

void UseHolds::close_scope() {
  PS_CHECK(!scopes_.empty(), StateError,
           "a module ended that had not begun; was a forward hook of PatrickStar removed?");
  release_transient();
  const Hold scope = std::move(scopes_.back());
  scopes_.pop_back();
  release(scope.params, Phase::kForward);
}

Tick UseHolds::touch(const std::vector<ParamId>& params) {
  if (!std::all_of(params.begin(), params.end(), [this](ParamId param) { return is_in_use(param); })) {
    acquire_in_turn(params);
    const bool transient = scopes_.empty() || scopes_.back().until == HoldUntil::kNextEvent;
    auto& holder = transient ? transient_ : scopes_.back().params;
    try {
      holder.insert(holder.end(), params.begin(), params.end());
    } catch (...) {
      release(params, Phase::kForward);
      throw;
    }
  }
  return tick();
}

void UseHolds::acquire_in_turn(const std::vector<ParamId>& params) {
  if (!scopes_.empty() || transient_.empty()) return acquire(params);
  try {
    acquire(params);
  } catch (const std::exception&) {  // no room
    release_transient();
    acquire(params);
  }
}

void UseHolds::enter_backward(Tick begin, Tick end, const std::vector<ParamId>& params) {
  release_transient();
  Hold hold{begin, params, HoldUntil::kScopeEnd};
  reserve_one(backward_);
  const auto first_over =
      std::stable_partition(backward_.begin(), backward_.end(), [end](const Hold& held) { return held.begin <= end; });
  const std::vector<Hold> over(std::make_move_iterator(first_over), std::make_move_iterator(backward_.end()));
  backward_.erase(first_over, backward_.end());
  release(over);
  for (const Hold& held : over) finalise(held.params);
  acquire(params);
  backward_.push_back(std::move(hold));
}

void UseHolds::release_all() {
  release_transient();
  while (!scopes_.empty()) close_scope();
  const std::vector<Hold> over = std::exchange(backward_, {});
  release(over);
  for (const Hold& held : over) finalise(held.params);
}

void UseHolds::abandon_all() {
  release_transient();
  while (!scopes_.empty()) close_scope();
  release(std::exchange(backward_, {}));
}

void UseHolds::release_transient() {
  if (!transient_.empty()) release(std::exchange(transient_, {}), Phase::kForward);
}

void UseHolds::release(const std::vector<Hold>& holds) {
  for (const Hold& hold : holds) release(hold.params, Phase::kBackward);
}

}  // namespace patrickstar
