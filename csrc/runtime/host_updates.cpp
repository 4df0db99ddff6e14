#include "runtime/host_updates.h"

#include <memory>
#include <utility>

namespace patrickstar {

Event HostUpdates::submit(HostUpdate update) {
  const auto shared = std::make_shared<const HostUpdate>(std::move(update));
  queue_.submit([this, shared] {
    if (shared->cancelled && *shared->cancelled) return;
    for (const Event& event : shared->after) backend_.synchronize(event);
    for (const Restore& restore : shared->restores) {
      compute_.cast_from_float(restore.in, restore.out, restore.dtype, restore.numel);
    }
    compute_.adam(shared->jobs);
  });
  return queue_.record();
}

}  // namespace patrickstar
