#include "plan/placement.h"

#include <algorithm>
#include <set>

#include "common/ablation.h"
#include "common/check.h"
#include "memory/slot_pool.h"

namespace patrickstar {

namespace {

// Chunks that may be on their way to the device ahead of their use, at most, where a late one makes the device wait.
constexpr int64_t kPrefetchedChunks = 16;
// Of the margin, what slots of several sizes waste at most where memory does not follow the tide, and no more than as
// much again as is kept for prefetches: a slot may be larger than what it serves (kMostSlotWaste).
constexpr double kSlotWasteShare = 0.05;
// Share of what the tide leaves for the states of the first chunks where those of all others stay on the host. A larger
// one was predicted to gain 4 % on two GPUs, and did not (benchmark/results/h200-one-program.txt).
constexpr double kBoundaryShare = 0.45;
constexpr int kBoundaryChunks = 3;
constexpr int64_t kBoundarySlack = int64_t{128} << 20;
// Of the new values of updates on the host, these are enough: the updates of the others wait beside the next forward
// ([Note: updates that wait], plan/plan_choice.h). For fewer it is not worth it that gradients leave the device: with
// half of them GPT 18.5 B took 4.5 to 5 s on an H200, and 3.3 s without any.
constexpr double kEnoughAhead = 0.8;
// Quantised chunks whose codes are on the device on their way into compute values ([Note: staging], engine/pager.h).
constexpr int64_t kStagings = 2;
// A size is rare that no more than this share of the chunks have, or a larger one.
constexpr double kRareShare = 0.125;
// Compute values that are made of codes on the device which are kept free room for: more are made when they are needed.
constexpr int64_t kDequantizedChunks = 4;

int64_t share(int64_t bytes, double ratio) { return static_cast<int64_t>(static_cast<double>(bytes) * ratio); }

// What scatters need beside the gradients: room for all ranks' parts, and the shards on their way to the host.
int64_t scatter_bytes(const Layout& layout) {
  int64_t largest = 0;
  for (const ChunkSpec& chunk : layout.chunks()) {
    if (!chunk.is_sharded()) continue;
    largest = std::max(largest, chunk.num_bytes(ArrayKind::kGrad) + 2 * chunk.num_bytes(ArrayKind::kGradShard));
  }
  return largest;
}

// What a chunk keeps beside its compute value.
int64_t lasting_bytes(const ChunkSpec& chunk) {
  return optimizer_bytes(chunk) + chunk.num_bytes(ArrayKind::kQuantized);
}

int64_t largest_quantized_bytes(const Layout& layout) {
  int64_t largest = 0;
  for (const ChunkSpec& chunk : layout.chunks()) largest = std::max(largest, chunk.num_bytes(ArrayKind::kQuantized));
  return largest;
}

int64_t largest_moment_bytes(const Layout& layout, const Timeline& timeline) {
  int64_t largest = 0;
  for (const Moment& moment : timeline.moments) {
    int64_t bytes = 0;
    for (const Access& access : moment.accesses) {
      if (access.mode != AccessMode::kRetire) bytes += layout.num_bytes(access.array);
    }
    largest = std::max(largest, bytes);
  }
  return largest;
}

// The chunks that backward finishes with are those that the next forward begins with. Updated on the device, they need
// not go down, through the host's update and up again while it waits.
int num_boundary_chunks(const Layout& layout, const Timeline& step, int64_t limit_bytes) {
  const int64_t left = limit_bytes - highest_tide(step);
  int64_t room = std::min(share(left, kBoundaryShare), left - 2 * largest_moment_bytes(layout, step) - kBoundarySlack);
  int count = 0;
  while (count < std::min(kBoundaryChunks, layout.num_chunks())) {
    const ChunkSpec& chunk = layout.chunk(count);
    room -= lasting_bytes(chunk) + chunk.num_bytes(ArrayKind::kParam) + chunk.num_bytes(ArrayKind::kGrad);
    if (room < 0) break;
    ++count;
  }
  return count;
}

// Half of the room that no moment needs for itself, up to a few chunks. On the simulated device a fetch takes no longer
// than a copy in memory, so there all room goes to what can stay.
int64_t prefetch_bytes(const Layout& layout, const PlanProblem& problem) {
  const int64_t room = problem.limit_bytes - problem.fixed_bytes - highest_tide(*problem.timeline);
  int64_t largest = 0;
  for (const ChunkSpec& chunk : layout.chunks()) largest = std::max(largest, chunk.num_bytes(ArrayKind::kParam));
  const int64_t spare = room - largest_moment_bytes(layout, *problem.timeline);
  return std::clamp(spare / 2, int64_t{0}, kPrefetchedChunks * largest);
}

// Of chunks of the usual size, which have `values` of compute values together.
int64_t usual_prefetch_bytes(const Layout& layout, int64_t values) {
  return std::min(values, kPrefetchedChunks * values / std::max(layout.num_chunks(), 1));
}

// The size above which arrays of compute values are rare, and too large for slots of the others: INT64_MAX where sizes
// are too different for that.
int64_t rare_above(const Layout& layout) {
  if (is_left_out(Mechanism::kRareSizes)) return INT64_MAX;
  std::vector<int64_t> sizes;
  for (const ChunkSpec& chunk : layout.chunks()) sizes.push_back(chunk.num_bytes(ArrayKind::kParam));
  if (sizes.empty()) return INT64_MAX;
  std::sort(sizes.begin(), sizes.end());
  const int64_t served = sizes[sizes.size() / 2] + share(sizes[sizes.size() / 2], kMostSlotWaste);
  const auto num_larger = sizes.end() - std::upper_bound(sizes.begin(), sizes.end(), served);
  return static_cast<double>(num_larger) <= kRareShare * static_cast<double>(sizes.size()) ? served : INT64_MAX;
}

// [Note: rare sizes] (memory/slot_pool.h): by moment, what slots of such sizes take that wait for the moment that needs
// most of them, but no more than half of what the moment leaves. Empty: there are none.
std::vector<int64_t> idle_slot_bytes(const Layout& layout, const PlanProblem& problem) {
  const int64_t above = rare_above(layout);
  const std::vector<Moment>& moments = problem.timeline->moments;
  std::vector<int64_t> rare(moments.size(), 0);
  std::vector<int64_t> idle(moments.size(), 0);
  for (size_t t = 0; t < moments.size(); ++t) {
    std::set<int> needed;
    idle[t] = room_bytes(problem, t);
    for (const Access& access : moments[t].accesses) {
      if (access.mode == AccessMode::kRetire || !needed.insert(access.array.index()).second) continue;
      const int64_t bytes = problem.arrays[static_cast<size_t>(access.array.index())].num_bytes;
      rare[t] += bytes > above ? bytes : 0;
      idle[t] -= bytes;
    }
  }
  const int64_t most = rare.empty() ? 0 : *std::max_element(rare.begin(), rare.end());
  if (most == 0) return {};
  for (size_t t = 0; t < moments.size(); ++t) {
    idle[t] = std::clamp(idle[t] / 2, int64_t{0}, most - rare[t]);
  }
  return idle;
}

// [Note: gradients in the tide] The first ones that wait on the device take none of what the tide leaves.
void put_gradients_into_tide(const Layout& layout, const Timeline& step, const std::vector<uint8_t>& states_on_device,
                             const DeviceBudget& budget, PlanProblem& problem) {
  int64_t left = budget.keeps_gradients ? budget.gradient_tide_bytes : 0;
  if (left == 0) return;
  for (const Moment& moment : step.moments) {
    for (const Access& access : moment.accesses) {
      const bool waits = layout.row(access.array).on_device == ArrayMemory::kTide &&
                         access.mode == AccessMode::kWrite &&
                         states_on_device[static_cast<size_t>(access.array.chunk)] != 0;
      int64_t& bytes = problem.arrays[static_cast<size_t>(access.array.index())].num_bytes;
      if (!waits || bytes == 0 || bytes > left) continue;
      left -= bytes;
      bytes = 0;
    }
  }
}

// What states on the device are reckoned with.
enum class Beside : uint8_t {
  kAllValues,  // compute values of all chunks, whose places gradients take
  kGradients,  // gradients that wait for the norm; compute values come when they are needed
  kNothing,    // these leave the device as well
};

// How many chunks, from the first on, have their states in `margin_bytes`, most of which may be used.
int num_state_chunks_within(const Layout& layout, const DeviceBudget& budget, int64_t margin_bytes, Beside beside) {
  int64_t usable = share(std::max<int64_t>(margin_bytes, 0), budget.margin_use_ratio);
  int64_t in_tide = budget.gradient_tide_bytes;
  int count = 0;
  for (const ChunkSpec& chunk : layout.chunks()) {
    usable -= lasting_bytes(chunk);
    if (chunk.trainable) {
      const ArrayRow& gradient = chunk.rows.gradient();
      const ArrayRow& param = chunk.rows.param();
      const bool reserves = gradient.on_device == ArrayMemory::kOwn || (budget.keeps_gradients && chunk.is_sharded());
      // Among all values there is the one that is a part of the states, and a gradient does not take its place.
      const bool is_apart = gradient.on_device == ArrayMemory::kTide;
      const bool waits = beside == Beside::kAllValues ? is_apart : beside == Beside::kGradients;
      const bool value = beside != Beside::kAllValues && is_apart;
      const bool shard =
          chunk.is_sharded() && param.on_device == ArrayMemory::kOwn;  // of one rank it is among the values
      if (reserves || (budget.keeps_gradients && waits)) {
        const int64_t without_slot = reserves ? 0 : std::min(gradient.num_bytes, in_tide);
        in_tide -= without_slot;
        usable -= gradient.num_bytes - without_slot;
      }
      if (value || shard) usable -= param.num_bytes;
    }
    if (budget.backwards == Backwards::kSeveral) usable -= accumulation_bytes(layout, count);
    if (usable < 0) break;
    ++count;
  }
  return count;
}

// What of the host's updates can start ahead of the step.
struct UpdatesAhead {
  int64_t value_bytes = 0;    // of the new compute values that they make
  int64_t waiting_bytes = 0;  // of those of the others
};

// Of the chunks from the first `count` on, which the host holds: those of whose compute values there is room for new
// ones beside the old.
UpdatesAhead updates_ahead(const Layout& layout, const Timeline& step, const DeviceBudget& budget, int count) {
  std::vector<uint8_t> on_device(layout.chunks().size(), 0);
  std::fill_n(on_device.begin(), count, uint8_t{1});
  int64_t room = budget.host_limit_bytes - reserved_gradient_bytes(layout);
  room -= leaving_gradient_bytes(layout, step, on_device, budget);
  for (ChunkId chunk = count; chunk < layout.num_chunks(); ++chunk) room -= home_bytes(layout.chunk(chunk));
  UpdatesAhead ahead;
  for (ChunkId chunk = count; chunk < layout.num_chunks(); ++chunk) {
    const ChunkSpec& spec = layout.chunk(chunk);
    if (!spec.trainable) continue;
    const int64_t bytes = least_new_bytes(layout, chunk);
    (bytes <= room ? ahead.value_bytes : ahead.waiting_bytes) += spec.rows.param().num_bytes;
    room -= bytes <= room ? bytes : 0;
  }
  return ahead;
}

bool is_enough(const UpdatesAhead& ahead) {
  return ahead.waiting_bytes <= share(ahead.value_bytes + ahead.waiting_bytes, 1 - kEnoughAhead);
}

}  // namespace

int64_t highest_tide(const Timeline& timeline) {
  int64_t highest = 0;
  for (const Moment& moment : timeline.moments) highest = std::max(highest, moment.tide_peak_bytes);
  return highest;
}

int64_t leaving_gradient_bytes(const Layout& layout, const Timeline& step, const std::vector<uint8_t>& states_on_device,
                               const DeviceBudget& budget) {
  if (budget.limit_bytes == INT64_MAX || layout.has_other_ranks() || !budget.keeps_gradients) return 0;
  int64_t states = 0;
  int64_t values = 0;
  for (ChunkId chunk = 0; chunk < layout.num_chunks(); ++chunk) {
    if (states_on_device[static_cast<size_t>(chunk)] != 0) states += placed_bytes(layout.chunk(chunk));
    values += layout.chunk(chunk).num_bytes(ArrayKind::kParam);
  }
  const int64_t prefetched = pose_problem(layout, step, states_on_device, budget).prefetch_bytes;
  const int64_t limit_bytes = budget.limit_bytes - std::min(prefetched, usual_prefetch_bytes(layout, values));
  std::set<int> waiting;
  int64_t gradients = 0;
  int64_t leaving = 0;
  for (const Moment& moment : step.moments) {
    int64_t others = 0;  // that the moment itself needs
    std::set<int> needed;
    for (const Access& access : moment.accesses) {
      if (access.mode == AccessMode::kRetire || !needed.insert(access.array.index()).second) continue;
      const bool waits = access.array.kind == ArrayKind::kGrad &&
                         layout.row(access.array).on_device != ArrayMemory::kOwn &&
                         states_on_device[static_cast<size_t>(access.array.chunk)] != 0;
      if (!waits) {
        others += layout.num_bytes(access.array);
      } else if (waiting.insert(access.array.index()).second) {
        gradients += layout.num_bytes(access.array);
      }
    }
    const int64_t in_slots = std::max<int64_t>(gradients - budget.gradient_tide_bytes, 0);
    leaving = std::max(leaving, states + in_slots + others + moment.tide_peak_bytes - limit_bytes);
  }
  return std::min(leaving, gradients);
}

std::vector<ChunkId> chunks_that_move_in(const Layout& layout, int count,
                                         const std::vector<uint8_t>& states_on_device) {
  int64_t room = 0;
  for (ChunkId chunk = 0; chunk < layout.num_chunks(); ++chunk) {
    const int64_t bytes = placed_bytes(layout.chunk(chunk));
    room += chunk < count ? bytes : 0;
    room -= states_on_device[static_cast<size_t>(chunk)] != 0 ? bytes : 0;
  }
  std::vector<ChunkId> chunks;
  for (ChunkId chunk = 0; chunk < count; ++chunk) {
    const int64_t bytes = placed_bytes(layout.chunk(chunk));
    if (bytes == 0 || bytes > room || states_on_device[static_cast<size_t>(chunk)] != 0) continue;
    chunks.push_back(chunk);
    room -= bytes;
  }
  return chunks;
}

PlanProblem pose_problem(const Layout& layout, const Timeline& last, const std::vector<uint8_t>& states_on_device,
                         const DeviceBudget& budget) {
  PlanProblem problem;
  problem.timeline = &last;
  problem.arrays.resize(static_cast<size_t>(layout.num_chunks()) * kNumArrayKinds);
  bool stages = false;
  for (ChunkId chunk = 0; chunk < layout.num_chunks(); ++chunk) {
    const ChunkSpec& spec = layout.chunk(chunk);
    const int64_t placed = placed_bytes(spec);
    const bool on_device = placed > 0 && states_on_device[static_cast<size_t>(chunk)] != 0;
    const ArrayRow& param = spec.rows[ArrayKind::kParam];
    const ArrayRow& value = spec.rows.value();
    // Gathered values leave the device at the end of a step, so that all ranks begin the next one alike.
    const bool survives = !spec.is_sharded() && (on_device || !spec.trainable);
    // Rows that placed_bytes() counts are fixed.
    const auto bytes_beside = [&](const ArrayRow& row) {
      return on_device && row.on_device == ArrayMemory::kOwn ? 0 : row.num_bytes;
    };
    problem.arrays[static_cast<size_t>(ArrayId{chunk, param.kind}.index())] = {
        bytes_beside(param), on_device ? 0 : value.num_bytes, 0, 0, survives};
    stages = stages || (spec.is_quantized() && !on_device);
    problem.fixed_bytes += on_device ? placed : 0;
    if (!spec.trainable) continue;
    const ArrayRow& grad = spec.rows[ArrayKind::kGrad];
    const bool retires = !on_device || param.source == Source::kMaster;
    problem.arrays[static_cast<size_t>(ArrayId{chunk, grad.kind}.index())] = {
        bytes_beside(grad), grad.num_bytes, grad.num_bytes, retires ? value.num_bytes : 0, false};
    const bool shard_waits =
        spec.is_sharded() && budget.keeps_gradients && spec.rows.gradient().on_device != ArrayMemory::kOwn;
    if (on_device && shard_waits) problem.fixed_bytes += value.num_bytes;
    if (on_device && budget.backwards == Backwards::kSeveral) {
      problem.fixed_bytes += spec.num_bytes(ArrayKind::kGradSum);
    }
  }
  put_gradients_into_tide(layout, last, states_on_device, budget, problem);
  problem.gradient_room_bytes = budget.gradient_room_bytes;
  problem.visits = visit_costs(layout);
  problem.fixed_bytes += scatter_bytes(layout);
  if (stages) problem.fixed_bytes += kStagings * largest_quantized_bytes(layout);
  if (budget.limit_bytes == INT64_MAX) return problem;
  if (!budget.follows_tide) problem.least_tide_bytes = highest_tide(last);
  problem.limit_bytes = budget.limit_bytes;
  if (!budget.follows_tide) problem.idle_bytes = idle_slot_bytes(layout, problem);
  if (budget.prefetches_far) problem.prefetch_bytes = prefetch_bytes(layout, problem);
  return problem;
}

int num_device_state_chunks(const Layout& layout, const Timeline& step, const DeviceBudget& budget) {
  if (budget.limit_bytes == INT64_MAX) return layout.num_chunks();
  int64_t margin = budget.limit_bytes - highest_tide(step) - scatter_bytes(layout);
  int64_t largest = 0;
  int64_t values = 0;
  int64_t own_values = 0;  // that no other rank has
  int64_t largest_trained = 0;
  int64_t dequantized = 0;
  int64_t largest_dequantized = 0;
  for (const ChunkSpec& chunk : layout.chunks()) {
    const int64_t bytes = chunk.num_bytes(ArrayKind::kParam);
    const bool quantized = chunk.is_quantized();
    (quantized ? dequantized : values) += bytes;
    if (!quantized && !chunk.is_sharded()) own_values += bytes;
    largest = std::max(largest, bytes);
    if (chunk.trainable) largest_trained = std::max(largest_trained, bytes);
    if (quantized) largest_dequantized = std::max(largest_dequantized, bytes);
  }
  values += std::min(dequantized, kDequantizedChunks * largest_dequantized);
  values += kStagings * largest_quantized_bytes(layout);
  // Shared values come from the other ranks, which is faster than from the host.
  if (layout.has_other_ranks()) values = own_values + std::min(values - own_values, kPrefetchedChunks * largest);
  const int64_t prefetched = usual_prefetch_bytes(layout, values);
  if (!budget.follows_tide) margin -= std::min(share(std::max<int64_t>(margin, 0), kSlotWasteShare), prefetched);
  const int64_t gradients = 2 * largest_trained;  // on their way; the others take their parameters' place
  const int count = num_state_chunks_within(layout, budget, margin - values - gradients, Beside::kAllValues);
  const int64_t without_values = margin - prefetched - gradients;  // which come when they are needed
  const int beside = num_state_chunks_within(layout, budget, without_values, Beside::kGradients);
  const int most = num_state_chunks_within(layout, budget, without_values, Beside::kNothing);
  // So many that gradients leave the device as well are worth it where enough updates on the host can start in backward
  // then; no more than it takes.
  int enough = count;
  UpdatesAhead ahead = updates_ahead(layout, step, budget, enough);
  if (!is_enough(ahead)) {
    int too_few = count;  // what a chunk gives the host's room is more than its gradient takes, so more are never worse
    enough = std::max(count, most);
    while (enough - too_few > 1) {
      const int middle = too_few + (enough - too_few) / 2;
      (is_enough(updates_ahead(layout, step, budget, middle)) ? enough : too_few) = middle;
    }
    ahead = updates_ahead(layout, step, budget, enough);
  }
  const int chosen = enough == count || is_enough(ahead) ? enough : std::max(count, beside);
  return budget.follows_tide ? chosen : std::max(chosen, num_boundary_chunks(layout, step, budget.limit_bytes));
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
  return largest + scatter_bytes(layout) + largest_quantized_bytes(layout);
}

}  // namespace patrickstar
