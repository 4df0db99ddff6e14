#include "engine/residency.h"

#include <algorithm>

namespace patrickstar {

namespace {

// States come back after 8 steps, the next time after 16, 32, ..., 256.
constexpr int kStepsAway = 8;
constexpr int kMostDoublings = 5;

int64_t share(int64_t bytes, double ratio) { return static_cast<int64_t>(static_cast<double>(bytes) * ratio); }

}  // namespace

// What tide and payloads may take, beside the states of other engines.
int64_t Residency::limit_within_slack() const {
  if (device_limit() == kUnlimited) return kUnlimited;
  SharedDevice& device = memory_.device();
  int64_t slack = 0;
  if (device.is_cuda()) slack = share(device_limit(), kCudaSlackRatio);
  if (device.is_cuda() && device.options().limit_rounding_bytes == 0) {
    slack = std::max(slack, std::min(kFixedSegmentSlack, share(device_limit(), kFixedSegmentSlackRatio)));
  }
  return device_limit() - slack - device.others_bytes(pager_).states;
}

// What payloads may take before the tide is known.
int64_t Residency::warmup_payload_limit() const {
  if (device_limit() == kUnlimited) return kUnlimited;
  int64_t limit = share(device_limit(), options_.warmup_payload_ratio);
  for (ChunkId chunk = 0; chunk < layout().num_chunks(); ++chunk) {
    if (home(chunk) == Tier::kDevice) limit += optimizer_bytes(layout().chunk(chunk));
  }
  return limit;
}

void Residency::place_initially() {
  const bool bounded = device_limit() != kUnlimited;
  const bool all_on_device = !bounded && options_.state_placement == StatePlacement::kHybrid;
  const int64_t others = memory_.device().others_bytes(pager_).states;
  const int64_t room = bounded ? share(device_limit(), kInitialDeviceShare) - others : kUnlimited;
  homes_ = initial_placement(layout(), memory_.arena().unreserved_bytes() - spare_bytes(), room, all_on_device);
  std::vector<int64_t> blocks;
  for (ChunkId id = 0; id < layout().num_chunks(); ++id) {
    if (home(id) == Tier::kDevice) continue;
    const ChunkSpec& chunk = layout().chunk(id);
    if (chunk.trainable) {
      for (ArrayKind kind : optimizer_arrays()) blocks.push_back(chunk.num_bytes(kind));
    }
    blocks.push_back(chunk.num_bytes(ArrayKind::kParamShard));
  }
  memory_.arena().reserve(blocks);
  pager_.set_payload_limit(warmup_payload_limit());
}

// One chunk more than the layout: a gradient whose parameters are still of use needs a block of its own.
int64_t Residency::spare_bytes() const {
  int64_t spare = 0;
  for (const ChunkSpec& chunk : layout().chunks()) spare = std::max(spare, chunk.num_bytes(ArrayKind::kGradShard));
  return spare;
}

Tier Residency::home_of_new_states(ChunkId chunk) const {
  return device_limit() == kUnlimited ? home(chunk) : Tier::kHost;
}

void Residency::place_in_margin(const Timeline& step) {
  if (options_.state_placement == StatePlacement::kHost) return;
  pager_.set_payload_limit(options_.payload_limit_bytes);
  const int count = num_device_state_chunks(layout(), step, budget_for_states());
  for (ChunkId chunk = 0; chunk < count; ++chunk) {
    if (layout().chunk(chunk).trainable) move_states_to_device(chunk);
  }
  memory_.arena().trim();
}

void Residency::fill_margin(const Timeline& step) {
  if (options_.state_placement == StatePlacement::kHost) return;
  const int count = num_device_state_chunks(layout(), step, budget_for_states());
  int64_t room = 0;
  for (ChunkId chunk = 0; chunk < layout().num_chunks(); ++chunk) {
    const int64_t bytes = optimizer_bytes(layout().chunk(chunk));
    room += chunk < count ? bytes : 0;
    room -= memory_.array({chunk, ArrayKind::kMaster}).on_device ? bytes : 0;
  }
  for (ChunkId chunk = 0; chunk < count; ++chunk) {
    const int64_t bytes = optimizer_bytes(layout().chunk(chunk));
    if (bytes == 0 || bytes > room || memory_.array({chunk, ArrayKind::kMaster}).on_device) continue;
    move_states_to_device(chunk);
    room -= bytes;
  }
  memory_.arena().trim();
}

bool Residency::is_time_to_return() {
  bool away = false;
  for (ChunkId chunk = 0; chunk < layout().num_chunks(); ++chunk) {
    away = away || (home(chunk) == Tier::kDevice && layout().chunk(chunk).trainable &&
                    !memory_.array({chunk, ArrayKind::kMaster}).on_device);
  }
  if (!away) {
    steps_away_ = 0;
    return false;
  }
  if (++steps_away_ < kStepsAway << std::min(num_returns_, kMostDoublings)) return false;
  steps_away_ = 0;
  ++num_returns_;
  return true;
}

void Residency::move_states_to_device(ChunkId chunk) {
  for (ArrayKind kind : optimizer_arrays()) {
    const ArrayId id{chunk, kind};
    ArrayRecord& record = memory_.array(id);
    if (record.on_device || !record.exists()) continue;
    ScopedHold hold(record);
    pager_.bring(id);
    hold.release();
    memory_.drop_block(id);
  }
  homes_[static_cast<size_t>(chunk)] = Tier::kDevice;
}

void Residency::limit_payloads(const Timeline& last) {
  const bool bounded = !memory_.backend().follows_tide() && device_limit() != kUnlimited;
  const int64_t ample = bounded ? limit_within_slack() - highest_tide(last) : kUnlimited;
  pager_.set_payload_limit(std::min(ample, options_.payload_limit_bytes));
  memory_.slots().set_ample_bytes(bounded ? ample : 0);
}

DeviceBudget Residency::device_budget() const {
  DeviceBudget budget;
  budget.limit_bytes = limit_within_slack();
  budget.follows_tide = memory_.backend().follows_tide();
  budget.prefetches_far = !budget.follows_tide || memory_.device().options().delays.simulates_link();
  budget.margin_use_ratio = options_.margin_use_ratio;
  budget.keeps_gradients = options_.keeps_gradients;
  return budget;
}

DeviceBudget Residency::budget_for_states() const {
  DeviceBudget budget = device_budget();
  if (budget.limit_bytes == kUnlimited) return budget;
  budget.limit_bytes -= std::min(memory_.device().others_bytes(pager_).values, budget.limit_bytes / 2);
  return budget;
}

PlanProblem Residency::plan_problem(const Timeline& last, const std::vector<uint8_t>& states_on_device) const {
  return pose_problem(layout(), last, states_on_device, device_budget());
}

}  // namespace patrickstar
