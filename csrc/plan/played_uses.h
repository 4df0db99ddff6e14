// The timeline that an engine would record of a step with given uses of its parameters, whatever the tide: moments,
// what they read and write, and gradients that leave. Holds are those of the engine (plan/use_holds.h).
//
// Pure functions of a layout; any thread.
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
  kFold,  // autograd gives a parameter's gradient
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
  std::vector<int64_t> moment_of;  // by use: the moment that lasts after it; -1: before the first one
  int64_t waste_bytes = 0;         // most that the chunks of a moment hold beside the parameters that it asks for
};

// `states_on_device` by chunk: with one rank gradients of such chunks stay there, unless they are applied at once.
PlayedUses play_uses(const Layout& layout, const std::vector<uint8_t>& states_on_device,
                     const std::vector<ParamUse>& uses);

}  // namespace patrickstar
