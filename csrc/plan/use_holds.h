// Parameters that a module's running calls and their backward hold: acquired by hooks, released by the rules below. The
// engine has their chunks on the device meanwhile (engine/access_tracker.h); a plan without a GPU notes when they are
// needed (plan/played_uses.h).
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
// One thread at a time.
#pragma once

#include <cstdint>
#include <vector>

#include "common/timeline.h"
#include "common/types.h"

namespace patrickstar {

// A point in time of one listener: uses that begin later have larger ones.
using Tick = int64_t;

enum class HoldUntil : uint8_t {
  kScopeEnd,   // a leaf module
  kNextEvent,  // a module with modules inside
};

class UseHolds {
 public:
  virtual ~UseHolds() = default;

  Tick tick() { return ++clock_; }

  // Begins a scope that acquires `params`. Returns its begin tick.
  Tick open_scope(const std::vector<ParamId>& params, HoldUntil until);
  // Ends the innermost scope. Throws StateError where there is none.
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

 protected:
  // Uses of the parameters begin. Where it throws none has.
  virtual void acquire(const std::vector<ParamId>& params) = 0;
  // One use of each is over, which began in `phase`.
  virtual void release(const std::vector<ParamId>& params, Phase phase) = 0;
  // Uses in backward are over, which may be the last that a complete gradient waited for.
  virtual void retire(const std::vector<ParamId>& params) = 0;
  virtual bool is_in_use(ParamId param) const = 0;

 private:
  struct Hold {
    Tick begin;
    std::vector<ParamId> params;
    HoldUntil until = HoldUntil::kScopeEnd;
  };

  // acquire(), for which the user's own earlier accesses make room where there is none.
  void acquire_in_turn(const std::vector<ParamId>& params);
  void release(const std::vector<Hold>& holds);

  Tick clock_ = 0;
  std::vector<Hold> scopes_;
  std::vector<Hold> backward_;
  std::vector<ParamId> transient_;
};

}  // namespace patrickstar
