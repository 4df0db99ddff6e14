#include "runtime/placement.h"

#include <algorithm>
#include <set>

#include "common/check.h"

namespace patrickstar {

int64_t optimizer_bytes(const ChunkSpec& chunk) {
  int64_t bytes = 0;
  if (!chunk.trainable) return bytes;
  for (ArrayKind kind : optimizer_arrays()) bytes += chunk.num_bytes(kind);
  return bytes;
}

int64_t home_bytes(const ChunkSpec& chunk) { return optimizer_bytes(chunk) + chunk.num_bytes(ArrayKind::kParam); }

std::vector<Tier> initial_placement(const Layout& layout, int64_t host_limit_bytes, int64_t device_room_bytes,
                                    bool device_unlimited) {
  int64_t on_host = 0;
  for (const ChunkSpec& chunk : layout.chunks()) on_host += home_bytes(chunk);
  int64_t on_device = 0;
  std::vector<Tier> tiers;
  for (const ChunkSpec& chunk : layout.chunks()) {
    const bool host = !device_unlimited && on_host <= host_limit_bytes;
    const int64_t bytes = host ? 0 : home_bytes(chunk);
    on_host -= bytes;
    on_device += bytes;
    tiers.push_back(host ? Tier::kHost : Tier::kDevice);
  }
  PS_CHECK(device_unlimited || on_device <= device_room_bytes, MemoryBudgetError,
           "parameters and optimizer states need ", on_host + on_device, " bytes; host memory takes ", host_limit_bytes,
           " and the device ", device_room_bytes, " before activations; raise host_memory or device_memory by ",
           on_device - device_room_bytes, " bytes");
  return tiers;
}

int num_margin_chunks(const Layout& layout, int64_t limit_bytes, int64_t tide_peak_bytes, double use_ratio) {
  if (limit_bytes == INT64_MAX) return layout.num_chunks();
  int64_t margin = limit_bytes - tide_peak_bytes;
  int64_t largest = 0;
  for (const ChunkSpec& chunk : layout.chunks()) {
    margin -= chunk.num_bytes(ArrayKind::kParam);
    largest = std::max(largest, chunk.num_bytes(ArrayKind::kGrad));
  }
  margin -= 2 * largest;  // gradients on their way; the others take their parameters' place
  auto usable = static_cast<int64_t>(static_cast<double>(std::max<int64_t>(margin, 0)) * use_ratio);
  int count = 0;
  for (const ChunkSpec& chunk : layout.chunks()) {
    usable -= optimizer_bytes(chunk);
    if (usable < 0) break;
    ++count;
  }
  return count;
}

int64_t working_set_bytes(const Layout& layout, const std::vector<std::vector<ParamId>>& module_params) {
  int64_t largest = 0;
  for (const auto& params : module_params) {
    std::set<ChunkId> chunks;
    int64_t largest_grad = 0;
    for (ParamId param : params) chunks.insert(layout.placement(param).chunk);
    int64_t bytes = 0;
    for (ChunkId id : chunks) {
      bytes += layout.chunk(id).num_bytes(ArrayKind::kParam);
      if (layout.chunk(id).trainable)
        largest_grad = std::max(largest_grad, layout.chunk(id).num_bytes(ArrayKind::kGrad));
    }
    largest = std::max(largest, bytes + largest_grad);
  }
  return largest;
}

}  // namespace patrickstar
