// Residency: the resting tier of states and frozen values from step to step, and the device bytes that chunks may take.
//
//   before the first step   states rest on the host; what does not fit there, on the disk or the device. Chunk buffers
//                           keep to a fixed share of the device, since activation memory is not known. Evaluations
//                           keep all values if they take at most half of the device
//   after its backward      activation memory is known: the first chunks' states move into the device memory that it
//                           leaves, and others from the disk to the freed host memory
//   after the next few      once more, if those steps leave more room than the first (is_settling())
//   after an unfreezing     once more, for the new states
//   once that is over       frozen values that stay on the device leave the host (leave_to_device())
//   while memory is lent    states leave the device, and return afterwards (step_course.h)
//   under pressure          states leave the device (engine/shared_device.h), and return after steps without pressure
//   after every step        poses the planner's problem for the next
//
// Guarded by the engine's lock.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "engine/pager.h"
#include "plan/placement.h"
#include "plan/planner.h"
#include "plan/resting_tiers.h"

namespace patrickstar {

enum class StatePlacement : uint8_t {
  kHybrid,  // optimizer states on the device as far as memory lasts, the others on the host
  kHost,    // all optimizer states on the host
};

struct ResidencyOptions {
  double warmup_payload_ratio = 0.1;  // share of the device limit for chunk buffers in the warm-up; not measured
  double margin_use_ratio = 1.0;
  int64_t chunk_buffer_limit_bytes = kUnlimited;  // for values fetched on demand, whatever activations leave (tests)
  StatePlacement state_placement = StatePlacement::kHybrid;
  bool keeps_gradients = true;      // DeviceBudget::keeps_gradients
  bool updates_take_memory = true;  // speculative updates: DeviceBudget::host_limit_bytes
  Backwards backwards = Backwards::kOne;
};

class Residency {
 public:
  Residency(Pager& pager, const ResidencyOptions& options)
      : pager_(pager), memory_(pager.memory()), options_(options) {}

  // Decides the first resting tiers and reserves host memory for them. Throws MemoryBudgetError if the budgets cannot
  // hold the model beside `working_set_bytes` on the device.
  void place_initially(int64_t working_set_bytes);
  // Moves states into the device memory that a step's activations leave.
  void place_in_headroom(const Timeline& step);
  // place_in_headroom() with more states than before: existing ones stay, others move in beside them.
  void fill_headroom(const Timeline& step);
  // True for a few steps after the first: PyTorch's allocator and fragments distort the first step's activation memory
  // (see kRechecks). Call it once per step; the same on all ranks.
  bool is_settling();
  // True if fill_headroom() would move in enough to be worth it, and no states have left the device under pressure.
  bool has_room_for_more(const Timeline& step) const;
  // True if states that left under pressure should return now. The delay grows with each return, so that batches with
  // an occasional need for the room do not move states back and forth. Call it once per step.
  bool is_time_to_return();
  // Resting tier for the states of a newly trained chunk: the device if it is unlimited, otherwise the host.
  Tier resting_tier_of_new_states(ChunkId chunk) const;
  void move_states_to_device(ChunkId chunk);
  // Brings back all states that rest on the device and are away. Their host memory stays prepared for the next time.
  void return_states();
  // Call after a step that followed `plan`, which is also the next step's plan. Frozen values that the plan keeps on
  // the device throughout rest there from now on, without a host copy. If one must leave later (another plan,
  // pressure), it is downloaded once and keeps that copy (Pager::keep_place). With several ranks, and during
  // is_settling(), no values move. Returns true if the host has gained room since the last call.
  bool leave_to_device(const Plan& plan);
  // For a step like `last`, also after a plan miss.
  ChunkBufferLimit chunk_buffer_limit(const Timeline& last) const;
  // `states_on_device`: by chunk, as all ranks agree.
  PlanProblem plan_problem(const Timeline& last, const std::vector<uint8_t>& states_on_device) const;
  // Bytes of gradients that will not fit on the device during a step like `last`, with states where they are now
  // (plan/placement.h). 0 before the first step.
  int64_t leaving_gradient_bytes(const Timeline& last) const;
  // Predicted peak of the arena's mapped bytes (plan/host_demand.h), with states where they are now. Before the first
  // step all states that can be are on the host.
  int64_t predicted_host_peak_bytes() const;
  // For states that stay: leaves room for other engines' values.
  DeviceBudget budget_for_states() const;
  // True if transfers take time that compute can hide, so that memory for prefetches pays.
  bool prefetches_far() const { return device_budget().prefetches_far; }

 private:
  const Layout& layout() const { return memory_.layout(); }
  ChunkStore& store() const { return memory_.store(); }
  int64_t device_limit() const { return memory_.device().options().device_limit_bytes; }
  int64_t limit_within_slack() const;
  DeviceBudget device_budget() const;
  int64_t warmup_chunk_buffer_limit() const;
  int64_t evaluation_chunk_buffer_limit() const;
  void reserve_resting_tiers_on_host();
  void bring_chunks_from_disk();
  void check_fits(const InitialPlacement& placement, int64_t device_room_bytes) const;
  std::vector<ChunkId> chunks_that_move_in(const Timeline& step) const;
  // By chunk.
  std::vector<Tier> resting_tiers() const;
  std::vector<uint8_t> states_on_device() const;
  // True if the chunk's states rest on the device and have left it under pressure, or for a loan of its memory.
  bool is_away(ChunkId chunk) const;
  bool any_away() const;
  void leave_frozen_to_device(const Plan& plan);
  // Drops the host copy of a frozen chunk whose values are on the device.
  void leave_host(ChunkId chunk);

  Pager& pager_;
  ChunkMemory& memory_;
  ResidencyOptions options_;
  std::vector<Tier> first_resting_tiers_;  // by chunk
  int num_rechecks_ = 0;                   // steps after the first that is_settling() allowed
  int steps_away_ = 0;                     // since states left the device
  int num_returns_ = 0;
  bool has_left_host_ = false;  // frozen values or codes left host memory that is not trimmed yet
};

}  // namespace patrickstar
