// Residency: what lives where from step to step, and how much of the device payloads may take.
//
//   before the first step   optimizer states on the host, what does not fit there on the device; payloads keep to a
//                           fixed share of the device, since the tide is not known
//   after its backward      the tide is known: the first chunks' states move into the margin that it leaves
//   after an unfreezing     the same once more, for what is new
//   after every step        poses the planner's problem for the next
//
// Owned by Runtime, guarded by its lock.
#pragma once

#include <cstdint>
#include <vector>

#include "backend/delaying_backend.h"
#include "plan/planner.h"
#include "runtime/pager.h"
#include "runtime/placement.h"

namespace patrickstar {

enum class Partition : uint8_t {
  kTide,    // payloads get what the tide leaves, moment by moment
  kStatic,  // payloads get a fixed share of the device
};

enum class StatePlacement : uint8_t {
  kHybrid,  // optimizer states in the device's margin, the others on the host
  kHost,    // all optimizer states on the host
};

struct ResidencyOptions {
  int64_t device_limit_bytes = kUnlimited;
  int64_t host_limit_bytes = kUnlimited;
  double warmup_payload_ratio = 0.1;  // of the device limit, for payloads before the tide is known
  double margin_use_ratio = 0.8;
  double slack_ratio = 0;  // of the device limit, left free for the allocator's rounding
  Partition partition = Partition::kTide;
  StatePlacement state_placement = StatePlacement::kHybrid;
  bool keeps_gradients = true;  // DeviceBudget::keeps_gradients
  DelayOptions delays;
};

class Residency {
 public:
  Residency(Core core, Pager& pager, const ResidencyOptions& options) : core_(core), pager_(pager), options_(options) {}

  // Decides the first homes and reserves host memory for them. Throws MemoryBudgetError when the budgets cannot hold
  // the model.
  void place_initially();
  // Moves states into the margin that a step's tide leaves.
  void place_in_margin(const Timeline& step);
  // The same when there are more states than before: those that are there stay, and others move in as far as the margin
  // has room beside them.
  void fill_margin(const Timeline& step);
  // Where those of a chunk that was frozen belong: on the device where nothing bounds it, else on the host.
  Tier home_of_new_states(ChunkId chunk) const;
  void set_home(ChunkId chunk, Tier tier) { homes_[static_cast<size_t>(chunk)] = tier; }
  void move_states_to_device(ChunkId chunk);
  // What host memory keeps free for a gradient that needs a block of its own.
  int64_t spare_bytes() const;
  // After a step: bounds what payloads may take in the next one, also where it departs from its plan.
  void limit_payloads(const Timeline& last);
  // `states_on_device` by chunk, as all ranks agree.
  PlanProblem plan_problem(const Timeline& last, const std::vector<uint8_t>& states_on_device) const;
  // Whether transfers take time that compute can hide, and memory may be given to that.
  bool prefetches_far() const { return options_.partition == Partition::kTide && device_budget().prefetches_far; }

  // Where the chunk's optimizer states are kept.
  Tier home(ChunkId chunk) const { return homes_[static_cast<size_t>(chunk)]; }

 private:
  const Layout& layout() const { return core_.store.layout(); }
  int64_t limit_within_slack() const;
  DeviceBudget device_budget() const;
  int64_t fixed_payload_limit() const;

  Core core_;
  Pager& pager_;
  ResidencyOptions options_;
  std::vector<Tier> homes_;
};

}  // namespace patrickstar
