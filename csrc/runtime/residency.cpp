#include "runtime/residency.h"

#include <algorithm>

namespace patrickstar {

namespace {

// Of a device limit, what optimizer states may take before activations are known.
constexpr double kInitialDeviceShare = 0.9;

int64_t share(int64_t bytes, double ratio) { return static_cast<int64_t>(static_cast<double>(bytes) * ratio); }

}  // namespace

// What tide and payloads may take.
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
  homes_ = initial_placement(layout(), options_.host_limit_bytes - spare_bytes(), room, all_on_device);
  std::vector<int64_t> blocks;
  for (ChunkId id = 0; id < layout().num_chunks(); ++id) {
    if (home(id) == Tier::kDevice) continue;
    const ChunkSpec& chunk = layout().chunk(id);
    if (chunk.trainable) {
      for (ArrayKind kind : optimizer_arrays()) blocks.push_back(chunk.num_bytes(kind));
    }
    blocks.push_back(chunk.num_bytes(ArrayKind::kParamShard));
  }
  core_.arena.reserve(blocks);
  pager_.set_payload_limit(fixed_payload_limit());
}

// One chunk more than the layout: a gradient whose parameters are still of use needs a block of its own.
int64_t Residency::spare_bytes() const {
  int64_t spare = 0;
  for (const ChunkSpec& chunk : layout().chunks()) spare = std::max(spare, chunk.num_bytes(ArrayKind::kGradShard));
  return spare;
}

Tier Residency::home_of_new_states(ChunkId chunk) const {
  return options_.device_limit_bytes == kUnlimited ? home(chunk) : Tier::kHost;
}

void Residency::place_in_margin(const Timeline& step) {
  if (options_.state_placement == StatePlacement::kHost || options_.partition == Partition::kStatic) return;
  pager_.set_payload_limit(kUnlimited);
  const int count = num_device_state_chunks(layout(), step, device_budget());
  for (ChunkId chunk = 0; chunk < count; ++chunk) {
    if (layout().chunk(chunk).trainable) move_states_to_device(chunk);
  }
  core_.arena.trim();
}

void Residency::fill_margin(const Timeline& step) {
  if (options_.state_placement == StatePlacement::kHost || options_.partition == Partition::kStatic) return;
  const int count = num_device_state_chunks(layout(), step, device_budget());
  int64_t room = 0;
  for (ChunkId chunk = 0; chunk < layout().num_chunks(); ++chunk) {
    const int64_t bytes = optimizer_bytes(layout().chunk(chunk));
    room += chunk < count ? bytes : 0;
    room -= core_.store.array({chunk, ArrayKind::kMaster}).on_device ? bytes : 0;
  }
  for (ChunkId chunk = 0; chunk < count; ++chunk) {
    const int64_t bytes = optimizer_bytes(layout().chunk(chunk));
    if (bytes == 0 || bytes > room || core_.store.array({chunk, ArrayKind::kMaster}).on_device) continue;
    move_states_to_device(chunk);
    room -= bytes;
  }
  core_.arena.trim();
}

void Residency::move_states_to_device(ChunkId chunk) {
  for (ArrayKind kind : optimizer_arrays()) {
    const ArrayId id{chunk, kind};
    ArrayRecord& record = core_.store.array(id);
    if (record.on_device || !record.exists()) continue;
    ScopedHold hold(record);
    pager_.bring(id);
    hold.release();
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

DeviceBudget Residency::device_budget() const {
  DeviceBudget budget;
  budget.limit_bytes = limit_within_slack();
  if (options_.partition == Partition::kStatic) budget.payload_limit_bytes = fixed_payload_limit();
  budget.follows_tide = core_.backend.follows_tide();
  budget.prefetches_far = !budget.follows_tide || options_.delays.simulates_link();
  budget.margin_use_ratio = options_.margin_use_ratio;
  budget.keeps_gradients = options_.keeps_gradients;
  return budget;
}

PlanProblem Residency::plan_problem(const Timeline& last, const std::vector<uint8_t>& states_on_device) const {
  return pose_problem(layout(), last, states_on_device, device_budget());
}

}  // namespace patrickstar
