// Whoever is told about uses of parameters: the calls of plan/use_holds.h, as those see them who observe the
// uses. The runtime listens in an engine; a plan without a GPU is made by a listener that writes them down
// (patrickstar/planning/uses.py).
//
// One thread at a time: the user's in forward, autograd's in backward.
#pragma once

#include <vector>

#include "common/types.h"
#include "plan/use_holds.h"

namespace patrickstar {

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
