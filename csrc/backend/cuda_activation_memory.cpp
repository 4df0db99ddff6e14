#include "backend/cuda_activation_memory.h"

#include <algorithm>
#include <utility>

#include "backend/cuda_device.h"
#include "backend/cuda_pressure.h"
#include "common/types.h"

namespace patrickstar {

namespace {

constexpr int64_t kAlignment = 512;
constexpr int64_t kPage = int64_t{2} << 20;
// Growth of cached memory after which a failed search is repeated: a snapshot of all blocks takes a millisecond.
constexpr int64_t kWorthLooking = int64_t{512} << 20;
// Growth of PyTorch's reserved memory per step that is not caused by regions.
constexpr int64_t kUsualGrowth = int64_t{64} << 20;

}  // namespace

void* CudaActivationRegions::allocate(int64_t num_bytes, void* stream) {
  const int64_t taken = round_up(num_bytes, kAlignment);
  const auto has_room = [taken](const Region& region) { return region.used + taken <= region.num_bytes; };
  auto region = std::find_if(regions_.begin(), regions_.end(), has_room);
  if (region == regions_.end()) {
    if (!add_region(taken, stream)) return nullptr;
    region = regions_.end() - 1;
  }
  char* pointer = region->begin + region->used;
  region->used += taken;
  ++region->num_in_use;
  return pointer;
}

void CudaActivationRegions::free(void* pointer) {
  const auto region = std::find_if(regions_.begin(), regions_.end(), [pointer](const Region& candidate) {
    return pointer >= candidate.begin && pointer < candidate.begin + candidate.num_bytes;
  });
  if (--region->num_in_use > 0) return;
  void* begin = region->begin;
  taken_bytes_ -= region->num_bytes;
  least_bytes_ = std::min(least_bytes_, taken_bytes_);
  regions_.erase(region);
  is_first_of_step_ = regions_.empty();
  cuda_api().free(begin);
}

int64_t CudaActivationRegions::take_least_bytes() { return std::exchange(least_bytes_, taken_bytes_); }

void CudaActivationRegions::note_growth(int64_t reserved) {
  if (last_reserved_ > 0) {
    const int64_t growth = reserved - last_reserved_;
    allowed_bytes_ = std::min(allowed_bytes_, step_bytes_);
    if (growth > kUsualGrowth) allowed_bytes_ = std::max<int64_t>(allowed_bytes_ - growth, 0);
  }
  last_reserved_ = reserved;
  step_bytes_ = 0;
  cached_in_vain_ = 0;
}

bool CudaActivationRegions::add_region(int64_t num_bytes, void* stream) {
  if (!is_first_of_step_ && num_bytes > allowed_bytes_ - taken_bytes_) return false;
  const int64_t cached = cached_cuda_bytes(device_);
  if (cached_in_vain_ > 0 && cached < cached_in_vain_ + kWorthLooking) return false;
  const CudaBlocks blocks = cuda_api().blocks(device_, stream);
  if (std::exchange(is_first_of_step_, false)) note_growth(blocks.reserved);
  if (blocks.reserved > last_reserved_ + kUsualGrowth) return false;
  const int64_t stays = std::max(kept_bytes_, blocks.largest_free / 4);
  const int64_t most = std::min(blocks.largest_free - stays, allowed_bytes_ - taken_bytes_);
  const int64_t region_bytes = most / kPage * kPage;
  if (region_bytes < num_bytes) {
    cached_in_vain_ = cached;
    return false;
  }
  const CudaDeviceBufferAllocationScope scope;
  void* const begin = cuda_api().allocate(region_bytes, stream);
  if (begin == nullptr) return false;
  taken_bytes_ += region_bytes;
  step_bytes_ += region_bytes;
  regions_.push_back({static_cast<char*>(begin), region_bytes, 0, 0});
  return true;
}

}  // namespace patrickstar
