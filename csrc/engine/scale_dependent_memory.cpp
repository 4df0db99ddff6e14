#include "engine/scale_dependent_memory.h"

#include <algorithm>

namespace patrickstar {

namespace {

// Sizes of the host buffers: halved from the largest down to the least while memory lasts. Not measured.
constexpr int64_t kMostBlock = int64_t{128} << 20;
constexpr int64_t kLeastBlock = int64_t{1} << 12;

}  // namespace

void ScaleDependentMemory::take(int64_t free_bytes, int64_t numel, int64_t elements_per_scale_dependent) {
  if (blocks_.empty()) {
    int64_t left = std::min(free_bytes, numel / elements_per_scale_dependent * optim::ScaleDependentValues::kBytes);
    for (int64_t size = kMostBlock; size >= kLeastBlock;) {
      HostBuffer block = size <= left ? arena_.try_allocate_prepared(size) : HostBuffer{};
      if (block) {
        left -= size;
        blocks_.push_back(std::move(block));
      } else {
        size /= 2;
      }
    }
    std::vector<optim::ScaleDependentStore::Memory> memory;
    for (const HostBuffer& block : blocks_) memory.push_back({static_cast<char*>(block.data), block.num_bytes});
    updates_.submit_task([this, memory = std::move(memory)] { store_.set_memory(memory); });
  }
  updates_.submit_task([this, numel] { store_.begin(numel); });
}

void ScaleDependentMemory::keep(ChunkId chunk, std::vector<optim::UpdateJob>& jobs) {
  int64_t pieces = 0;
  for (const optim::UpdateJob& job : jobs) pieces += optim::num_scale_dependent_pieces(job.range.numel);
  std::vector<optim::ScaleDependentValues>& dependent = scale_dependent_[static_cast<size_t>(chunk)];
  dependent.resize(static_cast<size_t>(pieces));
  optim::ScaleDependentValues* next = dependent.data();
  for (optim::UpdateJob& job : jobs) {
    job.store = &store_;
    job.dependent = next;
    next += optim::num_scale_dependent_pieces(job.range.numel);
  }
}

void ScaleDependentMemory::begin(ChunkId chunk, std::vector<optim::UpdateJob>& jobs) {
  keep(chunk, jobs);
  for (optim::ScaleDependentValues& dependent : scale_dependent_[static_cast<size_t>(chunk)])
    dependent.count = optim::ScaleDependentValues::kAll;
}

std::vector<HostBuffer> ScaleDependentMemory::give_back(Event& after) {
  after = updates_.submit_task([this] { store_.set_memory({}); });
  return std::exchange(blocks_, {});
}

}  // namespace patrickstar
