// Who uses which parameter, when: observed, not assumed.
//
// Forward. A *scope* is one running call of a module. A leaf's scope holds what it acquires, and what operations touch
// while it runs, until it ends. A module that contains others holds only until the next of them begins or ends (so it
// does not pin its own parameters through all its children); an operation after that touches again. Outside of any
// scope a touch is the user's own access and holds until the next event of the runtime, or until another needs the room.
//
// Backward. [Note: order of backward] Autograd runs nodes in descending order of their creation (its ready queue is
// sorted by sequence number, and consumers are always younger than producers). So when the backward of a use A is
// about to run, every use that began after A had ended is over in backward as well, and what it holds is released.
// This needs no hook on inputs and is exact for residual branches, shared modules and recomputation. Uses carry the
// values of one clock, `ticks`, for this comparison.
//
// Guarded by the runtime's lock.
#pragma once

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "runtime/pager.h"

namespace patrickstar {

using Tick = int64_t;

enum class Tracking {
  kTraining,   // recorded, replayed, held for backward
  kUntracked,  // evaluation or the user's own access: on demand, leaves the trace alone
};

// Of a forward.
enum class Attempt : uint8_t {
  kRepeatable,  // one that runs out of device memory is made again, with an emptier device
  kLast,
};

enum class HoldUntil : uint8_t {
  kScopeEnd,   // a leaf module
  kNextEvent,  // a module with modules inside
};

class AccessTracker {
 public:
  AccessTracker(Core core, Pager& pager);

  Tick tick() { return ++clock_; }
  Tracking tracking() const { return tracking_; }
  void set_tracking(Tracking tracking) { tracking_ = tracking; }
  void set_phase(Phase phase) { phase_ = phase; }

  // Begins a scope that acquires `params`. Returns its begin tick.
  Tick open_scope(const std::vector<ParamId>& params, HoldUntil until);
  // Ends the innermost scope.
  void close_scope();
  int num_open_scopes() const { return static_cast<int>(scopes_.size()); }

  // An operation is about to use `params`. Returns the tick of the use.
  Tick touch(const std::vector<ParamId>& params);

  // The backward of a use that ran in [begin, end] is about to start.
  void enter_backward(Tick begin, Tick end, const std::vector<ParamId>& params);
  // Releases everything: the end of a forward, a backward, or an error.
  void release_all();
  // Releases what is held until the next event only.
  void release_transient();

  bool is_held(ParamId param) const { return uses_[static_cast<size_t>(param)] > 0; }

  // Called with each chunk that a backward release may have left without users.
  using ReleaseListener = std::function<void(ChunkId)>;
  void set_backward_release_listener(ReleaseListener listener) { on_backward_release_ = std::move(listener); }

 private:
  struct Hold {
    Tick begin;
    std::vector<ParamId> params;
    HoldUntil until = HoldUntil::kScopeEnd;
  };

  void acquire(const std::vector<ParamId>& params);
  // The same; where there is no room, the user's own earlier accesses make it.
  void acquire_in_turn(const std::vector<ParamId>& params);
  void release(const std::vector<ParamId>& params, State to);
  State forward_release_state() const;

  Core core_;
  Pager& pager_;
  Tracking tracking_ = Tracking::kUntracked;
  Phase phase_ = Phase::kForward;
  Tick clock_ = 0;
  std::vector<int> uses_;  // by parameter: open holds
  std::vector<Hold> scopes_;
  std::vector<Hold> backward_;
  std::vector<ParamId> transient_;
  ReleaseListener on_backward_release_;
};

}  // namespace patrickstar
