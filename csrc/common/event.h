// A point in the work of one queue of the backend.
//
// A null Event is complete. Backends derive their own state; everybody else passes events around. An
// event keeps what it needs alive, so dropping it is always safe.
#pragma once

#include <memory>

namespace patrickstar {

struct EventState {
  virtual ~EventState() = default;
};

using Event = std::shared_ptr<EventState>;

}  // namespace patrickstar
