// Listener to uses of parameters, with the calls of plan/use_holds.h. In an engine the runtime listens; to plan without
// a GPU, a recorder of uses does (patrickstar/planning/step_uses.py).
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
