// Who uses which parameter, when: observed, not assumed.
//
// Forward. A *scope* is one running call of a module. A leaf's scope holds what it acquires, and what operations touch
// while it runs, until it ends. A module that contains others holds only until the next of them begins or ends (so it
// does not pin its own parameters through all its children); an operation after that touches again. Outside of any
// scope a touch is the user's own access and holds until the next event of the runtime, or until another needs the
// room.
//
// Backward. [Note: order of backward] Autograd runs nodes in descending order of their creation (its ready queue is
// sorted by sequence number, and consumers are always younger than producers). So when the backward of a use A is
// about to run, every use that began after A had ended is over in backward as well, and what it holds is released.
// This needs no hook on inputs and is exact for residual branches, shared modules and recomputation. Uses carry the
// values of one clock, `ticks`, for this comparison.
//
// Guarded by the engine's lock.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/gradient_flow.h"
#include "engine/pager.h"
#include "engine/rank_turns.h"
#include "engine/step_state.h"
#include "engine/use_listener.h"

namespace patrickstar {

// Of a forward.
enum class Attempt : uint8_t {
  kFirst,  // one that runs out of device memory is made again, with an emptier device
  kAgain,  // so is this one
  kLast,
  kOnly,  // the first one, which is not made again: other ranks wait for this one in the middle of it
};

class AccessTracker {
 public:
  AccessTracker(Pager& pager, GradientFlow& gradients, RankTurns& turns, const Step& step);

  Tick tick() { return ++clock_; }

  // Begins a scope that acquires `params`. Returns its begin tick.
  Tick open_scope(const std::vector<ParamId>& params, HoldUntil until);
  // Ends the innermost scope.
  void close_scope();
  int num_open_scopes() const { return static_cast<int>(scopes_.size()); }

  // An operation is about to use `params`. Returns the tick of the use.
  Tick touch(const std::vector<ParamId>& params);

  // The backward of a use that ran in [begin, end] is about to start.
  void enter_backward(Tick begin, Tick end, const std::vector<ParamId>& params);
  // Releases everything: the end of a forward or a backward.
  void release_all();
  // The same after an error: what is complete does not retire, so that no update begins.
  void abandon_all();
  // Releases what is held until the next event only.
  void release_transient();

 private:
  struct Hold {
    Tick begin;
    std::vector<ParamId> params;
    HoldUntil until = HoldUntil::kScopeEnd;
  };

  void acquire(const std::vector<ParamId>& params);
  void bring(const std::vector<ArrayId>& arrays);
  // As acquire(); where there is no room, the user's own earlier accesses make it.
  void acquire_in_turn(const std::vector<ParamId>& params);
  void release(const std::vector<ParamId>& params, State to);
  void release(const std::vector<Hold>& holds);
  void retire(const std::vector<Hold>& holds);
  State forward_release_state() const;

  Pager& pager_;
  ChunkStore& store_;
  GradientFlow& gradients_;
  RankTurns& turns_;
  const Step& step_;
  Tick clock_ = 0;
  std::vector<Hold> scopes_;
  std::vector<Hold> backward_;
  std::vector<ParamId> transient_;
};

}  // namespace patrickstar
