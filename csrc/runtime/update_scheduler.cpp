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
// Passing through the device has costs that its own time does not show: the link and the device's memory are others' too.
constexpr double kDeviceHandicap = 1.25;

int64_t buffer_bytes(StreamingMode mode, const Layout& layout, int64_t device_limit_bytes) {
  if (mode == StreamingMode::kOff) return 0;
  int64_t largest = 0;
  for (const ChunkSpec& chunk : layout.chunks()) {
    if (chunk.trainable) largest = std::max(largest, optimizer_bytes(chunk) + chunk.num_bytes(ArrayKind::kGrad));
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
      streamed_(core.backend, core.host_compute, core.device_compute, core.slots, core.tracer, core.delays) {}

void UpdateScheduler::prepare() {
  if (mode_ != StreamingMode::kOff && num_releases_ < kMaxReleases) streamed_.open(buffer_bytes_);
}

void UpdateScheduler::release_device_memory() {
  if (!streamed_.is_open()) return;
  streamed_.close();
  ++num_releases_;
}

bool UpdateScheduler::prefers_device(int64_t numel) const {
  if (!streamed_.is_open()) return false;
  if (mode_ == StreamingMode::kAlways) return true;
  return kDeviceHandicap * streamed_.rate().seconds_until_done(numel) < host_.rate().seconds_until_done(numel);
}

Event UpdateScheduler::submit(HostUpdate update) {
  if (!prefers_device(update.numel())) return host_.submit(std::move(update));
  ++counters_.num_streamed_updates;
  return streamed_.submit(std::move(update));
}

}  // namespace patrickstar
