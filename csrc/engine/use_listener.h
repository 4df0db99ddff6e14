// Whoever is told about uses of parameters: the calls of engine/access_tracker.h, as those see them who observe the
// uses. The runtime listens in an engine; a plan without a GPU is made by a listener that writes them down
// (patrickstar/planning/uses.py).
//
// One thread at a time: the user's in forward, autograd's in backward.
#pragma once

#include <cstdint>
#include <vector>

#include "common/types.h"

namespace patrickstar {

// A point in time of one listener: uses that begin later have larger ones.
using Tick = int64_t;

enum class HoldUntil : uint8_t {
  kScopeEnd,   // a leaf module
  kNextEvent,  // a module with modules inside
};

class UseListener {
 public:
  virtual ~UseListener() = default;
  virtual Tick open_scope(const std::vector<ParamId>& params, HoldUntil until) = 0;
  virtual void close_scope() = 0;
  virtual Tick tick() = 0;
  virtual Tick touch(const std::vector<ParamId>& params) = 0;
  virtual void enter_backward(Tick begin, Tick end, const std::vector<ParamId>& params) = 0;
};

}  // namespace patrickstar
