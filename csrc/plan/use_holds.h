// Which parameters running module calls and their backward hold. The engine keeps their chunks on the device
// (engine/access_tracker.h); plans without a GPU record when they are needed (plan/played_uses.h).
//
// Forward. A *scope* is one running call of a module. A leaf's scope holds its parameters, and those that operations
// touch in it, until it ends. A module with submodules holds only until the next module begins or ends, so it does not
// pin its own parameters through all its children; later operations touch them again. A touch outside any scope is the
// user's own access. It holds until the next event, or until another access needs the room.
//
// Backward. Autograd runs nodes in descending order of creation: its ready queue is sorted by sequence number, and
// consumers are younger than producers. When the backward of a use A is about to run, every use that began after A
// ended is over in backward too. Its parameters are released. This needs no hook on inputs and is exact for residual
// branches, shared modules and recomputation. Uses carry ticks of one clock for this comparison.
//
// One thread at a time.
#pragma once

#include <cstdint>
#include <vector>

#include "common/timeline.h"
#include "common/types.h"

namespace patrickstar {

// Time on one listener's clock.
using Tick = int64_t;

enum class HoldUntil : uint8_t {
  kScopeEnd,   // a leaf module
  kNextEvent,  // a module with submodules
};

class UseHolds {
 public:
  virtual ~UseHolds() = default;

  Tick tick() { return ++clock_; }

  // Acquires `params`. Returns the scope's begin tick.
  Tick open_scope(const std::vector<ParamId>& params, HoldUntil until);
  // Throws StateError if no scope is open.
  void close_scope();

  // An operation is about to use `params`. Returns the tick of the use.
  Tick touch(const std::vector<ParamId>& params);

  // Call before the backward of a use that ran in [begin, end].
  void enter_backward(Tick begin, Tick end, const std::vector<ParamId>& params);
  // Call at the end of a forward or a backward.
  void release_all();
  // The same after an error: complete gradients are not finalised, so no update begins.
  void abandon_all();
  // Releases HoldUntil::kNextEvent holds.
  void release_transient();

 protected:
  // Uses of `params` begin. If it throws, none has begun.
  virtual void acquire(const std::vector<ParamId>& params) = 0;
  // One use of each parameter, which began in `phase`, is over.
  virtual void release(const std::vector<ParamId>& params, Phase phase) = 0;
  // Backward uses are over. Gradients that are complete and waited for them can be finalised.
  virtual void finalise(const std::vector<ParamId>& params) = 0;
  virtual bool is_in_use(ParamId param) const = 0;

 private:
  struct Hold {
    Tick begin;
    std::vector<ParamId> params;
    HoldUntil until = HoldUntil::kScopeEnd;
  };

  // acquire(); if it throws, releases the user's own accesses and tries again.
  void acquire_in_turn(const std::vector<ParamId>& params);
  void release(const std::vector<Hold>& holds);

  Tick clock_ = 0;
  std::vector<Hold> scopes_;
  std::vector<Hold> backward_;
  std::vector<ParamId> transient_;
};

}  // namespace patrickstar
