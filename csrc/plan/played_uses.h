// The timeline that an engine would record for given parameter uses, without activation memory. Holds follow the
// engine's rules (plan/use_holds.h). Pure functions of a layout; any thread.
#pragma once

#include <cstdint>
#include <vector>

#include "chunk/layout.h"
#include "common/timeline.h"
#include "plan/use_holds.h"

namespace patrickstar {

enum class UseCall : uint8_t {
  kOpenScope,
  kCloseScope,
  kTouch,
  kEndForward,
  kEnterBackward,
  kAccumulate,  // autograd delivers a parameter's gradient
};

struct ParamUse {
  UseCall call = UseCall::kTouch;
  std::vector<ParamId> params;
  HoldUntil until = HoldUntil::kScopeEnd;  // of kOpenScope
  Tick begin = 0;                          // of kEnterBackward
  Tick end = 0;
};

struct PlayedUses {
  Timeline timeline;
  std::vector<int64_t> access_of;  // by use: access that is current after it; -1: none yet
  int64_t waste_bytes = 0;         // most bytes held at an access beside the parameters it needs
};

// `states_on_device` is by chunk. On one rank, gradients of such chunks stay on the device unless applied at once.
PlayedUses play_uses(const Layout& layout, const std::vector<uint8_t>& states_on_device,
                     const std::vector<ParamUse>& uses);

}  // namespace patrickstar
