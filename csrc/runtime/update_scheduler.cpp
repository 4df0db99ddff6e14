#include "runtime/update_scheduler.h"

#include <algorithm>
#include <utility>

#include "runtime/placement.h"

namespace patrickstar {

namespace {

// Pieces of this size move at nearly the link's speed (four copies of more than 8 MiB each way).
constexpr int64_t kMaxBufferBytes = int64_t{64} << 20;
constexpr int64_t kMinBufferBytes = 8192;  // holds kAlignment elements
constexpr int64_t kBufferShare = 128;      // of the device's memory, a buffer is at most one part in so many
// After so many times that something else needed their memory, buffers are not taken again.
constexpr int kMaxReleases = 3;
// The device helps out where the host is so far behind; what it takes then is not needed before it has come back.
constexpr double kLeastBacklogSeconds = 0.1;
// [Note: shared host memory] Both executors read and write the states in host memory, so one slows the other. The device
// takes part only as long as both together are faster, by so much, than the host's threads alone were.
constexpr double kLeastGain = 1.5;
// On a smaller device its memory is better used otherwise.
constexpr int64_t kLeastDeviceBytes = int64_t{1} << 30;

int64_t buffer_bytes(StreamingMode mode, const Layout& layout, int64_t device_limit_bytes) {
  if (mode == StreamingMode::kOff) return 0;
  if (mode == StreamingMode::kAuto && device_limit_bytes < kLeastDeviceBytes) return 0;
  int64_t largest = 0;
  for (const ChunkSpec& chunk : layout.chunks()) {
    if (chunk.trainable) largest = std::max(largest, optimizer_bytes(chunk) + chunk.num_bytes(ArrayKind::kGradShard));
  }
  const int64_t share = device_limit_bytes == kUnlimited ? kMaxBufferBytes : device_limit_bytes / kBufferShare;
  return std::max(std::min({largest, share, kMaxBufferBytes}), kMinBufferBytes);
}

}  // namespace

int64_t streaming_bytes(StreamingMode mode, const Layout& layout, int64_t device_limit_bytes) {
  return StreamedUpdates::kNumBuffers * buffer_bytes(mode, layout, device_limit_bytes);
}

UpdateScheduler::UpdateScheduler(const Core& core, StreamingMode mode)
    : counters_(core.counters),
      mode_(mode),
      buffer_bytes_(buffer_bytes(mode, core.store.layout(), core.backend.limit_bytes())),
      host_(core.backend, core.host_compute, core.tracer, core.delays, core.pool.num_threads()),
      streamed_(core.backend, core.host_compute, core.device_compute, core.slots, core.tracer, core.delays) {
  host_.set_neighbour(streamed_.rate());
}

void UpdateScheduler::prepare() {
  if (buffer_bytes_ > 0 && num_releases_ < kMaxReleases) streamed_.open(buffer_bytes_);
}

void UpdateScheduler::release_device_memory() {
  if (!streamed_.is_open()) return;
  streamed_.close();
  ++num_releases_;
}

bool UpdateScheduler::prefers_device(int64_t numel) const {
  if (!streamed_.is_open()) return false;
  if (mode_ == StreamingMode::kAlways) return true;
  const double host_seconds = host_.rate().seconds_until_done(numel);
  if (host_seconds < kLeastBacklogSeconds || streamed_.rate().seconds_until_done(numel) > host_seconds) return false;
  const double together = host_.params_per_second_beside() + streamed_.rate().params_per_second();
  return together > kLeastGain * host_.params_per_second_alone();
}

Event UpdateScheduler::submit(HostUpdate update) {
  if (!prefers_device(update.numel())) return host_.submit(std::move(update));
  ++counters_.num_streamed_updates;
  return streamed_.submit(std::move(update));
}

}  // namespace patrickstar
