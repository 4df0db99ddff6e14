// Residency: what lives where from step to step, and how much of the device payloads may take.
//
//   before the first step   optimizer states on the host, what does not fit there on the disk or on the device;
//                           payloads keep to a fixed share of the device, since the tide is not known
//   after its backward      the tide is known: the first chunks' states move into the margin that it leaves, and others
//                           from the disk to where these were on the host
//   after the next few      the same once more, where they leave more room than the first did ([Note: settling])
//   after an unfreezing     the same once more, for what is new
//   once that is over       frozen values that stay leave the host ([Note: frozen values that stay])
//   under pressure          states leave the device (engine/shared_device.h); they come back when steps went without
//   after every step        poses the planner's problem for the next
//
// Guarded by the engine's lock.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "engine/pager.h"
#include "plan/homes.h"
#include "plan/placement.h"
#include "plan/planner.h"

namespace patrickstar {

enum class StatePlacement : uint8_t {
  kHybrid,  // optimizer states in the device's margin, the others on the host
  kHost,    // all optimizer states on the host
};

struct ResidencyOptions {
  double warmup_payload_ratio = 0.1;  // of the device limit, for payloads before the tide is known
  double margin_use_ratio = 1.0;
  int64_t payload_limit_bytes = kUnlimited;  // of what is fetched on demand, whatever the tide leaves (for tests)
  StatePlacement state_placement = StatePlacement::kHybrid;
  bool keeps_gradients = true;      // DeviceBudget::keeps_gradients
  bool updates_take_memory = true;  // those ahead of the step: DeviceBudget::host_limit_bytes
  Backwards backwards = Backwards::kOne;
};

class Residency {
 public:
  Residency(Pager& pager, const ResidencyOptions& options)
      : pager_(pager), memory_(pager.memory()), options_(options) {}

  // Decides the first homes and reserves host memory for them. Throws MemoryBudgetError when the budgets cannot hold
  // the model beside `working_set_bytes` on the device.
  void place_initially(int64_t working_set_bytes);
  // Moves states into the margin that a step's tide leaves.
  void place_in_margin(const Timeline& step);
  // The same when there are more states than before: those that are there stay, and others move in as far as the margin
  // has room beside them.
  void fill_margin(const Timeline& step);
  // Whether the margin is looked at again after this step, which is so for a few after the first ([Note: settling]). To
  // be asked once per step that follows it; the same on all ranks.
  bool is_settling();
  // Whether fill_margin() would move in enough to be worth it, and nothing has left the device under pressure.
  bool has_room_for_more(const Timeline& step) const;
  // Whether states that left the device under pressure are to come back now: so many steps later that batches which
  // need the room every now and then do not make them come and go. To be asked once per step.
  bool is_time_to_return();
  // Where those of a chunk that was frozen belong: on the device where nothing bounds it, else on the host.
  Tier home_of_new_states(ChunkId chunk) const;
  void move_states_to_device(ChunkId chunk);
  // [Note: frozen values that stay] After a step that went as `plan` says, which is that of the next one too: what it
  // keeps of frozen values on the device throughout is at home there from now on, without a copy on the host. What
  // leaves in spite of that (another plan, pressure) goes down once and keeps its copy (Pager::keep_place).
  // Several ranks have no values that stay, and while margins are looked at ([Note: settling]) plans still change.
  // Returns whether the host has more room since the last call.
  bool leave_to_device(const Plan& plan);
  // After a step of several ranks: what fragments take on the one where they take the most, once all have seen theirs.
  void set_ranks_fragments(std::optional<int64_t> num_bytes) { ranks_fragments_ = num_bytes; }
  // After a step: bounds what payloads may take in the next one, also where it departs from its plan.
  void limit_payloads(const Timeline& last);
  // `states_on_device` by chunk, as all ranks agree.
  PlanProblem plan_problem(const Timeline& last, const std::vector<uint8_t>& states_on_device) const;
  // Of a step like `last`, with states where they are now (plan/placement.h). 0 before the first step.
  int64_t leaving_gradient_bytes(const Timeline& last) const;
  // What the arena will have mapped at its peak ([Note: the host's peak], plan/host_demand.h), with states where they
  // are now: before the first step all that do not have to be on the device are on the host.
  int64_t predicted_host_peak_bytes() const;
  // Whether transfers take time that compute can hide, and memory may be given to that.
  bool prefetches_far() const { return device_budget().prefetches_far; }

 private:
  const Layout& layout() const { return memory_.layout(); }
  ChunkStore& store() const { return memory_.store(); }
  int64_t device_limit() const { return memory_.device().options().device_limit_bytes; }
  int64_t limit_within_slack() const;
  std::optional<int64_t> fragment_bytes() const;
  DeviceBudget device_budget() const;
  int64_t warmup_payload_limit() const;
  void reserve_homes_on_host();
  void bring_home_from_disk();
  void check_fits(const InitialPlacement& placement, int64_t device_room_bytes) const;
  // For states that stay: other engines' values are to find room beside them.
  DeviceBudget budget_for_states() const;
  std::vector<ChunkId> chunks_that_move_in(const Timeline& step) const;
  // By chunk.
  std::vector<Tier> homes() const;
  std::vector<uint8_t> states_on_device() const;
  // Whose states left the device under pressure.
  bool any_away() const;
  void leave_frozen_to_device(const Plan& plan);
  // A frozen chunk, whose values are on the device.
  void leave_host(ChunkId chunk);

  Pager& pager_;
  ChunkMemory& memory_;
  ResidencyOptions options_;
  std::vector<Tier> first_homes_;  // by chunk
  std::optional<int64_t> ranks_fragments_;
  int num_looks_ = 0;   // at the margin, of steps after the first
  int steps_away_ = 0;  // since states left the device
  int num_returns_ = 0;
  bool has_left_host_ = false;  // frozen values or codes, whose memory was not given back yet
};

}  // namespace patrickstar
