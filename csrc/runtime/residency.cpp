#include "runtime/residency.h"

#include <algorithm>

#include "runtime/placement.h"

namespace patrickstar {

namespace {

// Of a device limit, what optimizer states may take before activations are known.
constexpr double kInitialDeviceShare = 0.9;
// Chunks that may be on their way to the device ahead of their use, at most, where a late one makes the device wait.
constexpr int64_t kPrefetchedChunks = 16;
// Of what the tide leaves, what the states of the first chunks may take where those of all others stay on the host.
constexpr double kBoundaryShare = 1.0 / 3;
constexpr int kBoundaryChunks = 2;
constexpr int64_t kBoundarySlack = int64_t{128} << 20;

int64_t share(int64_t bytes, double ratio) { return static_cast<int64_t>(static_cast<double>(bytes) * ratio); }

int64_t highest_tide(const Timeline& timeline) {
  int64_t highest = 0;
  for (const Moment& moment : timeline.moments) highest = std::max(highest, moment.tide_peak_bytes);
  return highest;
}

}  // namespace

int64_t Residency::limit_within_slack() const {
  const int64_t limit = options_.device_limit_bytes;
  return limit == kUnlimited ? kUnlimited : share(limit, 1 - options_.slack_ratio);
}

// The share of the device that payloads may take before the tide is known, or always with a static partition.
int64_t Residency::fixed_payload_limit() const {
  if (options_.device_limit_bytes == kUnlimited) return kUnlimited;
  int64_t limit = share(options_.device_limit_bytes, options_.warmup_payload_ratio);
  for (ChunkId chunk = 0; chunk < layout().num_chunks(); ++chunk) {
    if (home(chunk) == Tier::kDevice) limit += optimizer_bytes(layout().chunk(chunk));
  }
  return limit;
}

void Residency::place_initially() {
  const bool bounded = options_.device_limit_bytes != kUnlimited;
  const bool all_on_device = !bounded && options_.state_placement == StatePlacement::kHybrid;
  const int64_t room = bounded ? share(options_.device_limit_bytes, kInitialDeviceShare) : kUnlimited;
  // One chunk more than the layout: a gradient whose parameters are still of use needs a block of its own.
  int64_t spare = 0;
  for (const ChunkSpec& chunk : layout().chunks()) spare = std::max(spare, chunk.num_bytes(ArrayKind::kGrad));
  homes_ = initial_placement(layout(), options_.host_limit_bytes - spare, room, all_on_device);
  std::vector<int64_t> blocks;
  for (ChunkId id = 0; id < layout().num_chunks(); ++id) {
    if (home(id) == Tier::kDevice) continue;
    const ChunkSpec& chunk = layout().chunk(id);
    if (chunk.trainable) {
      for (ArrayKind kind : optimizer_arrays()) blocks.push_back(chunk.num_bytes(kind));
    }
    blocks.push_back(chunk.num_bytes(ArrayKind::kParam));
  }
  core_.arena.reserve(blocks);
  pager_.set_payload_limit(fixed_payload_limit());
}

void Residency::place_in_margin(const Timeline& step) {
  if (options_.state_placement == StatePlacement::kHost || options_.partition == Partition::kStatic) return;
  pager_.set_payload_limit(kUnlimited);
  int count = num_margin_chunks(layout(), limit_within_slack(), highest_tide(step), options_.margin_use_ratio);
  if (!core_.backend.follows_tide()) count = std::max(count, num_boundary_chunks(step));
  for (ChunkId chunk = 0; chunk < count; ++chunk) {
    if (layout().chunk(chunk).trainable) move_states_to_device(chunk);
  }
  core_.arena.trim();
}

// The chunks that backward finishes with are those that the next forward begins with. Updated on the device, they need
// not go down, through the host's update and up again while it waits.
int Residency::num_boundary_chunks(const Timeline& step) const {
  const int64_t left = limit_within_slack() - highest_tide(step);
  int64_t room = std::min(share(left, kBoundaryShare), left - 2 * largest_moment_bytes(step) - kBoundarySlack);
  int count = 0;
  while (count < std::min(kBoundaryChunks, layout().num_chunks())) {
    const ChunkSpec& chunk = layout().chunk(count);
    room -= optimizer_bytes(chunk) + chunk.num_bytes(ArrayKind::kParam) + chunk.num_bytes(ArrayKind::kGrad);
    if (room < 0) break;
    ++count;
  }
  return count;
}

void Residency::move_states_to_device(ChunkId chunk) {
  for (ArrayKind kind : optimizer_arrays()) {
    const ArrayId id{chunk, kind};
    ArrayRecord& record = core_.store.array(id);
    if (record.on_device || !record.exists()) continue;
    ++record.holds;
    pager_.bring(id);
    --record.holds;
    pager_.drop_block(id);
  }
  homes_[static_cast<size_t>(chunk)] = Tier::kDevice;
}

void Residency::limit_payloads(const Timeline& last) {
  int64_t ample = 0;
  if (options_.partition == Partition::kStatic) {
    pager_.set_payload_limit(fixed_payload_limit());
  } else if (core_.backend.follows_tide() || options_.device_limit_bytes == kUnlimited) {
    pager_.set_payload_limit(kUnlimited);
  } else {
    ample = limit_within_slack() - highest_tide(last);
    pager_.set_payload_limit(ample);
  }
  core_.slots.set_ample_bytes(ample);
}

PlanProblem Residency::plan_problem(const Timeline& last) const {
  PlanProblem problem;
  problem.timeline = &last;
  problem.arrays.resize(static_cast<size_t>(core_.store.num_arrays()));
  for (ChunkId chunk = 0; chunk < layout().num_chunks(); ++chunk) {
    const bool trainable = layout().chunk(chunk).trainable;
    const bool states_on_device = trainable && core_.store.array({chunk, ArrayKind::kMaster}).on_device;
    const ArrayId param{chunk, ArrayKind::kParam};
    const ArrayId grad{chunk, ArrayKind::kGrad};
    const int64_t bytes = core_.store.num_bytes(param);
    problem.arrays[static_cast<size_t>(param.index())] = {bytes, states_on_device ? 0 : bytes, 0, 0,
                                                          states_on_device || !trainable};
    problem.arrays[static_cast<size_t>(grad.index())] = {bytes, bytes, bytes, bytes, false};
    if (!states_on_device) continue;
    for (ArrayKind kind : optimizer_arrays()) problem.fixed_bytes += core_.store.num_bytes({chunk, kind});
  }
  if (options_.device_limit_bytes == kUnlimited) return problem;
  if (!core_.backend.follows_tide()) problem.least_tide_bytes = highest_tide(last);
  problem.limit_bytes = limit_within_slack();
  if (options_.partition == Partition::kStatic) {
    problem.payload_limit_bytes = fixed_payload_limit() - problem.fixed_bytes;
  } else if (!core_.backend.follows_tide()) {
    problem.prefetch_bytes = prefetch_bytes(problem);
  }
  return problem;
}

int64_t Residency::largest_moment_bytes(const Timeline& timeline) const {
  int64_t largest = 0;
  for (const Moment& moment : timeline.moments) {
    int64_t bytes = 0;
    for (const Access& access : moment.accesses) {
      if (access.mode != AccessMode::kRetire) bytes += core_.store.num_bytes(access.array);
    }
    largest = std::max(largest, bytes);
  }
  return largest;
}

// Half of the room that no moment needs for itself, up to a few chunks. On the simulated device a fetch takes no longer
// than a copy in memory, so there all room goes to what can stay.
int64_t Residency::prefetch_bytes(const PlanProblem& problem) const {
  const int64_t room = problem.limit_bytes - problem.fixed_bytes - problem.least_tide_bytes;
  int64_t largest = 0;
  for (const ChunkSpec& chunk : layout().chunks()) largest = std::max(largest, chunk.num_bytes(ArrayKind::kParam));
  const int64_t spare = room - largest_moment_bytes(*problem.timeline);
  return std::clamp(spare / 2, int64_t{0}, kPrefetchedChunks * largest);
}

}  // namespace patrickstar
