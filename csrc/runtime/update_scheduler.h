// Who updates the chunks whose states are on the host: the host's threads, or the device, through which the states pass.
// An update goes to the device when the host's threads are far behind, the device would be done with it first, by measured
// speeds and by what waits there already, and both together are faster than the host alone. Guarded by the runtime's lock.
#pragma once

#include <cstdint>

#include "runtime/host_updates.h"
#include "runtime/pager.h"
#include "runtime/streamed_updates.h"

namespace patrickstar {

enum class StreamingMode : uint8_t {
  kOff,     // the host's threads do all updates
  kAuto,    // the device helps where the host's threads are behind
  kAlways,  // the device does all, as long as it has room for staging buffers
};

// Of device memory, what the staging buffers take.
int64_t streaming_bytes(StreamingMode mode, const Layout& layout, int64_t device_limit_bytes);

class UpdateScheduler {
 public:
  UpdateScheduler(const Core& core, StreamingMode mode);

  // Before a step's updates: takes the device memory that streaming needs, if there is room.
  void prepare();
  // Gives it back, because something else needs it.
  void release_device_memory();

  Event submit(HostUpdate update);

 private:
  bool prefers_device(int64_t numel) const;

  Counters& counters_;
  StreamingMode mode_;
  int64_t buffer_bytes_;
  int num_releases_ = 0;
  HostUpdates host_;
  StreamedUpdates streamed_;
};

}  // namespace patrickstar
