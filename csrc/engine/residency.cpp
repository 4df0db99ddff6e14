#include "engine/residency.h"

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <utility>

#include "common/ablation.h"
#include "common/check.h"
#include "common/sizes.h"
#include "plan/host_demand.h"

namespace patrickstar {

namespace {

// Steps until states return after pressure: 8, then 16, 32, ..., 256. Not measured.
constexpr int kStepsAway = 8;
constexpr int kMostDoublings = 5;
// Steps after the first whose activation memory is checked again, and the least share of the device for which states
// then move in. In the first step, PyTorch's cache holds memory that no plan accounts for. Moving states cancels that
// step's speculative updates. Not measured.
constexpr int kRechecks = 4;
constexpr double kWorthMoving = 0.02;
// Largest share of the device that all values may take to stay in evaluations before the first step. Not measured.
constexpr double kEvaluationShare = 0.5;

int64_t share(int64_t bytes, double ratio) { return static_cast<int64_t>(static_cast<double>(bytes) * ratio); }

}  // namespace

// Bytes for activations and chunk buffers, beside other engines' states and the allocator's slack.
int64_t Residency::limit_within_slack() const {
  if (device_limit() == kUnlimited) return kUnlimited;
  SharedDevice& device = memory_.device();
  int64_t slack = device.is_cuda() ? share(device_limit(), kCudaSlackRatio) : 0;
  if (device.is_cuda() && device.options().limit_rounding_bytes == 0) {
    slack = std::max(slack, std::min(kFixedSegmentSlack, share(device_limit(), kFixedSegmentSlackRatio)));
  }
  return device_limit() - slack - device.others_bytes(pager_).states;
}

// Bound on chunk buffers before activation memory is known.
int64_t Residency::warmup_chunk_buffer_limit() const {
  if (device_limit() == kUnlimited) return kUnlimited;
  int64_t limit = share(device_limit(), options_.warmup_payload_ratio);
  for (ChunkId chunk = 0; chunk < layout().num_chunks(); ++chunk) {
    if (store().resting_tier(chunk) == Tier::kDevice) limit += held_bytes(layout(), chunk, options_.backwards);
  }
  return limit;
}

int64_t Residency::evaluation_chunk_buffer_limit() const {
  int64_t values = 0;
  for (ChunkId chunk = 0; chunk < layout().num_chunks(); ++chunk) {
    const ArrayId whole{chunk, ArrayKind::kParam}, resting = layout().value_resting_tier(chunk);
    values += layout().num_bytes(whole) + (resting == whole ? 0 : layout().num_bytes(resting));
  }
  const bool stay = device_limit() != kUnlimited && values <= share(device_limit(), kEvaluationShare);
  const int64_t limit = warmup_chunk_buffer_limit();
  return stay ? std::max(limit, values) : limit;
}

void Residency::check_fits(const InitialPlacement& placement, int64_t device_room_bytes) const {
  int64_t needed = 0;
  for (ChunkId chunk = 0; chunk < layout().num_chunks(); ++chunk) {
    needed += held_bytes(layout(), chunk, options_.backwards);
  }
  const bool accumulates = options_.backwards == Backwards::kSeveral;
  const HostArena& arena = memory_.arena();
  const int64_t left = std::max<int64_t>(arena.unreserved_bytes(), 0);
  const int64_t missing = placement.host_bytes - left;
  const int64_t own = arena.mapped_bytes();  // updates of whole matrices (engine/matrix_updates.h)
  const int64_t others = arena.limit_bytes() - left - own;
  const std::string on_disk = placement.disk_bytes > 0
                                  ? detail::join(", and the disk has ", show_exactly(placement.disk_bytes))
                                  : std::string();
  std::string taken =
      others > 0 ? detail::join(", of which other engines of this process have ", show_exactly(others)) : "";
  if (own > 0) taken += detail::join(", and updates of whole matrices take ", show_exactly(own));
  PS_CHECK(missing <= 0, MemoryBudgetError,
           accumulates
               ? "parameters, optimizer states and gradients that accumulate (gradient_accumulation_steps) need "
               : "parameters and optimizer states need ",
           show_exactly(needed), ", of which the device has room for ", show_exactly(device_room_bytes),
           " before activations", on_disk, "; the others and a gradient on its way take ",
           show_exactly(placement.host_bytes), " on the host, and host memory takes ", show_exactly(left),
           "; host_memory is ", show_exactly(arena.limit_bytes()), taken, "; raise host_memory to at least ",
           show_enough(arena.limit_bytes() + missing), ", or device_memory",
           pager_.disk().options().limit_bytes > 0 ? ", or disk_memory.size" : "");
}

void Residency::place_initially(int64_t working_set_bytes) {
  const bool bounded = device_limit() != kUnlimited;
  const bool all_on_device = !bounded && options_.state_placement == StatePlacement::kHybrid;
  const int64_t room = std::max<int64_t>(limit_within_slack() - working_set_bytes, 0);
  const int64_t host_limit = all_on_device ? spare_bytes(layout()) : memory_.arena().unreserved_bytes();
  const int64_t disk_limit = all_on_device ? 0 : pager_.disk().options().limit_bytes;
  const InitialPlacement placement = initial_placement(layout(), host_limit, room, options_.backwards, disk_limit);
  if (!all_on_device) check_fits(placement, room);
  for (ChunkId chunk = 0; chunk < layout().num_chunks(); ++chunk) {
    store().set_resting_tier(chunk, placement.resting_tiers[static_cast<size_t>(chunk)]);
  }
  first_resting_tiers_ = placement.resting_tiers;
  reserve_resting_tiers_on_host();
  pager_.disk().open();
  pager_.limit_chunk_buffers({warmup_chunk_buffer_limit(), 0, evaluation_chunk_buffer_limit()});
}

Tier Residency::resting_tier_of_new_states(ChunkId chunk) const {
  return device_limit() == kUnlimited ? store().resting_tier(chunk) : Tier::kHost;
}

// Arrays are reserved in the order of first use (memory/host_arena.h): masters when parameters move in, momentum and
// variance in the first step.
void Residency::reserve_resting_tiers_on_host() {
  std::vector<ArrayId> arrays;
  std::vector<int64_t> sizes;
  const auto in_order = [](const ArrayRows& rows) {
    return std::array<const ArrayRow*, 5>{&rows[ArrayKind::kMaster], &rows.value(), &rows.gradient(),
                                          &rows[ArrayKind::kMomentum], &rows[ArrayKind::kVariance]};
  };
  for (size_t i = 0; i < 5; ++i) {
    for (ChunkId chunk = 0; chunk < layout().num_chunks(); ++chunk) {
      const ArrayRow& row = *in_order(layout().chunk(chunk).rows)[i];
      const Tier resting_tier = store().resting_tier(chunk);
      if (row.on_host != ArrayMemory::kOwn || resting_tier == Tier::kDevice) continue;
      if (resting_tier == Tier::kDisk && is_optimizer_state(row.kind)) continue;
      arrays.push_back({chunk, row.kind});
      sizes.push_back(row.num_bytes);
    }
  }
  std::vector<HostBuffer> blocks = memory_.arena().reserve(sizes);
  for (size_t i = 0; i < arrays.size(); ++i) memory_.array(arrays[i]).block = std::move(blocks[i]);
}

void Residency::place_in_headroom(const Timeline& step) {
  if (options_.state_placement == StatePlacement::kHost) return;
  pager_.limit_chunk_buffers({options_.chunk_buffer_limit_bytes, 0, options_.chunk_buffer_limit_bytes});
  fill_headroom(step);
}

void Residency::fill_headroom(const Timeline& step) {
  if (options_.state_placement == StatePlacement::kHost) return;
  for (ChunkId chunk : chunks_that_move_in(step)) move_states_to_device(chunk);
  memory_.arena().trim();
  bring_chunks_from_disk();
}

// Moves states from the disk into host memory that other states have left for the device.
void Residency::bring_chunks_from_disk() {
  for (ChunkId chunk : chunks_leaving_disk(layout(), resting_tiers(), pager_.best_effort_room_bytes())) {
    std::vector<HostBuffer> blocks;
    for (ArrayKind kind : layout().chunk(chunk).state_kinds()) {
      blocks.push_back(pager_.try_allocate_resting_tier(layout().num_bytes({chunk, kind})));
      if (!blocks.back()) return;
    }
    pager_.disk().move_to_host(chunk, std::move(blocks));
  }
}

std::vector<ChunkId> Residency::chunks_that_move_in(const Timeline& step) const {
  const int count = num_device_state_chunks(layout(), step, budget_for_states());
  return patrickstar::chunks_that_move_in(layout(), count, states_on_device());
}

std::vector<Tier> Residency::resting_tiers() const {
  std::vector<Tier> result;
  for (ChunkId chunk = 0; chunk < layout().num_chunks(); ++chunk) result.push_back(store().resting_tier(chunk));
  return result;
}

std::vector<uint8_t> Residency::states_on_device() const {
  std::vector<uint8_t> result;
  for (ChunkId chunk = 0; chunk < layout().num_chunks(); ++chunk) {
    result.push_back(store().has_states_on_device(chunk));
  }
  return result;
}

bool Residency::is_settling() {
  if (num_rechecks_ == kRechecks) return false;
  ++num_rechecks_;
  return true;
}

bool Residency::has_room_for_more(const Timeline& step) const {
  if (options_.state_placement == StatePlacement::kHost || device_limit() == kUnlimited || any_away()) return false;
  int64_t bytes = 0;
  for (ChunkId chunk : chunks_that_move_in(step)) bytes += placed_bytes(layout().chunk(chunk));
  return bytes > share(device_limit(), kWorthMoving);
}

bool Residency::is_away(ChunkId chunk) const {
  const bool has_states = placed_bytes(layout().chunk(chunk)) > 0;
  return store().resting_tier(chunk) == Tier::kDevice && has_states && !store().has_states_on_device(chunk);
}

bool Residency::any_away() const {
  for (ChunkId chunk = 0; chunk < layout().num_chunks(); ++chunk) {
    if (is_away(chunk)) return true;
  }
  return false;
}

void Residency::return_states() {
  for (ChunkId chunk = 0; chunk < layout().num_chunks(); ++chunk) {
    if (is_away(chunk)) move_states_to_device(chunk);
  }
}

bool Residency::is_time_to_return() {
  if (!any_away()) {
    steps_away_ = 0;
    return false;
  }
  if (++steps_away_ < kStepsAway << std::min(num_returns_, kMostDoublings)) return false;
  steps_away_ = 0;
  ++num_returns_;
  return true;
}

void Residency::move_states_to_device(ChunkId chunk) {
  if (layout().chunk(chunk).is_quantized()) {
    pager_.bring({chunk, ArrayKind::kQuantized});
    leave_host(chunk);
    return;
  }
  const bool was_on_disk = store().resting_tier(chunk) == Tier::kDisk;
  if (was_on_disk) pager_.disk().fetch(chunk);
  for (ArrayKind kind : layout().chunk(chunk).state_kinds()) {
    const ArrayId id{chunk, kind};
    ArrayRecord& record = memory_.array(id);
    if (record.on_device) {
      if (!was_on_disk) memory_.drop_host_buffer(id);  // the buffer into which the state would have left
      continue;
    }
    if (record.exists()) {
      const ScopedHold hold(record);
      pager_.bring(id);
    }
    if (!was_on_disk) memory_.drop_host_buffer(id);  // also the reserved buffer of a state that is not made yet
  }
  if (was_on_disk) pager_.disk().forget(chunk);
  const ArrayId param = layout().param_resting_tier(chunk);
  if (layout().chunk(chunk).keeps_param() && memory_.array(param).exists()) pager_.bring(param);
  memory_.drop_host_buffer(param);
  const ArrayId grad = layout().grad_resting_tier(chunk);
  if (layout().row(grad).on_host == ArrayMemory::kOwn && !memory_.array(grad).on_host) memory_.drop_host_buffer(grad);
  store().set_resting_tier(chunk, Tier::kDevice);
}

bool Residency::leave_to_device(const Plan& plan) {
  if (num_rechecks_ < kRechecks) return false;
  if (!layout().has_other_ranks()) leave_frozen_to_device(plan);
  if (!std::exchange(has_left_host_, false)) return false;
  memory_.arena().trim();
  return true;
}

void Residency::leave_frozen_to_device(const Plan& plan) {
  std::vector<uint8_t> leaves(static_cast<size_t>(store().num_arrays()), 0);
  for (const AccessPlan& access : plan.accesses) {
    for (ArrayId id : access.evict) leaves[static_cast<size_t>(id.index())] = 1;
    for (ArrayId id : access.evict_ahead) leaves[static_cast<size_t>(id.index())] = 1;
  }
  for (ChunkId chunk = 0; chunk < layout().num_chunks(); ++chunk) {
    const ArrayId id{chunk, ArrayKind::kParam};
    const ArrayRecord& record = memory_.array(id);
    const bool lies_twice = layout().value_resting_tier(chunk) == id && record.on_device && record.on_host;
    if (layout().chunk(chunk).trainable || !lies_twice || store().resting_tier(chunk) == Tier::kDevice) continue;
    if (leaves[static_cast<size_t>(id.index())] != 0) continue;
    leave_host(chunk);
  }
}

void Residency::leave_host(ChunkId chunk) {
  if (store().resting_tier(chunk) == Tier::kHost) pager_.keep_place(chunk);
  memory_.drop_host_buffer(layout().value_resting_tier(chunk));
  store().set_resting_tier(chunk, Tier::kDevice);
  has_left_host_ = true;
}

ChunkBufferLimit Residency::chunk_buffer_limit(const Timeline& last) const {
  const bool bounded = !memory_.backend().follows_activations() && device_limit() != kUnlimited;
  const int64_t ample = bounded ? limit_within_slack() - highest_activation_memory(last) : kUnlimited;
  const int64_t most = std::min(ample, options_.chunk_buffer_limit_bytes);
  return {most, bounded ? ample : 0, most};
}

DeviceBudget Residency::device_budget() const {
  DeviceBudget budget;
  budget.limit_bytes = limit_within_slack();
  budget.follows_activations = memory_.backend().follows_activations();
  budget.prefetches_far = !budget.follows_activations || memory_.device().options().delays.simulates_link();
  budget.margin_use_ratio = options_.margin_use_ratio;
  budget.keeps_gradients = options_.keeps_gradients;
  budget.backwards = options_.backwards;
  budget.gradient_activation_bytes = memory_.activation_memory().room_bytes();
  const HostArena& arena = memory_.arena();
  const int64_t host_limit = arena.free_bytes() + arena.used_bytes();
  if (options_.updates_take_memory) budget.host_limit_bytes = host_limit;
  budget.gradient_room_bytes = gradient_room_bytes(layout(), resting_tiers(), host_limit);
  return budget;
}

DeviceBudget Residency::budget_for_states() const {
  DeviceBudget budget = device_budget();
  if (budget.limit_bytes == kUnlimited) return budget;
  budget.limit_bytes -= std::min(memory_.device().others_bytes(pager_).values, budget.limit_bytes / 2);
  return budget;
}

int64_t Residency::leaving_gradient_bytes(const Timeline& last) const {
  return patrickstar::leaving_gradient_bytes(layout(), last, states_on_device(), device_budget());
}

int64_t Residency::predicted_host_peak_bytes() const {
  std::vector<uint8_t> on_device;
  for (ChunkId chunk = 0; chunk < layout().num_chunks(); ++chunk) {
    on_device.push_back(store().resting_tier(chunk) == Tier::kDevice);
  }
  const HostArena& arena = memory_.arena();
  const int64_t limit = arena.free_bytes() + arena.used_bytes();  // of this engine
  const auto ahead = options_.updates_take_memory ? NewValuesAhead::kWhereThereIsRoom : NewValuesAhead::kNever;
  return host_peak_bytes(layout(), first_resting_tiers_, on_device, limit, ahead, options_.backwards);
}

PlanProblem Residency::plan_problem(const Timeline& last, const std::vector<uint8_t>& states_on_device) const {
  return pose_problem(layout(), last, states_on_device, device_budget());
}

}  // namespace patrickstar
