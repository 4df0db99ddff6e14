#include "plan/placement.h"

#include <algorithm>
#include <set>

#include "common/ablation.h"
#include "common/check.h"
#include "memory/device_buffer_pool.h"

namespace patrickstar {

namespace {

// Most chunks that may be prefetched at a time. Not measured by itself.
constexpr int64_t kPrefetchedChunks = 16;
// Share of the headroom lost to device buffers larger than their arrays (kMostDeviceBufferWaste), where buffers do not
// follow activation memory. Never more than usual_prefetch_bytes(). Not measured by itself.
constexpr double kDeviceBufferWasteShare = 0.05;
// Device room, beside activation memory, for the states of the first chunks when all others' stay on the host. A rule
// that admitted one chunk more was predicted 1.042 x faster on two GPUs and was not
// (benchmark/results/h200-one-program.txt). kBoundaryChunks and kBoundarySlack: not measured.
constexpr double kBoundaryShare = 0.45;
constexpr int kBoundaryChunks = 3;
constexpr int64_t kBoundarySlack = int64_t{128} << 20;
// Share of the host's updates that must be able to start in backward for states to displace gradients on the device.
// With half of them, 18.5 B took 4.5 to 5 s; without displacement 3.3 s
// (benchmark/results/h200-more-states-on-device.txt).
constexpr double kEnoughAhead = 0.8;
// Quantised chunks whose codes are staged on the device at a time (engine/executor.h). Not measured.
constexpr int64_t kStagings = 2;
// An array size is rare if at most this share of chunks is larger than the median chunk's buffers can serve. Not
// measured.
constexpr double kRareShare = 0.125;
// Compute values dequantised on the device that get reserved room; more are made on demand. Not measured.
constexpr int64_t kDequantizedChunks = 4;

int64_t share(int64_t bytes, double ratio) { return static_cast<int64_t>(static_cast<double>(bytes) * ratio); }

// Device memory of reduce-scatter beside the gradients: all ranks' parts, and shards on their way to the host.
int64_t scatter_bytes(const Layout& layout) {
  int64_t largest = 0;
  for (const ChunkSpec& chunk : layout.chunks()) {
    if (!chunk.is_sharded()) continue;
    largest = std::max(largest, chunk.num_bytes(ArrayKind::kGrad) + 2 * chunk.num_bytes(ArrayKind::kGradShard));
  }
  return largest;
}

// Bytes beside the compute value.
int64_t lasting_bytes(const ChunkSpec& chunk) {
  return optimizer_bytes(chunk) + chunk.num_bytes(ArrayKind::kQuantized);
}

int64_t largest_quantized_bytes(const Layout& layout) {
  int64_t largest = 0;
  for (const ChunkSpec& chunk : layout.chunks()) largest = std::max(largest, chunk.num_bytes(ArrayKind::kQuantized));
  return largest;
}

int64_t largest_access_bytes(const Layout& layout, const Timeline& timeline) {
  int64_t largest = 0;
  for (const Access& access : timeline.accesses) {
    int64_t bytes = 0;
    for (const ArrayUse& use : access.uses) {
      if (use.mode != ArrayUseMode::kFinalise) bytes += layout.num_bytes(use.array);
    }
    largest = std::max(largest, bytes);
  }
  return largest;
}

// Backward ends with the chunks that the next forward begins with. With their states on the device, the forward does
// not wait for their download, host update and upload.
int num_boundary_chunks(const Layout& layout, const Timeline& step, int64_t limit_bytes) {
  const int64_t left = limit_bytes - highest_activation_memory(step);
  int64_t room = std::min(share(left, kBoundaryShare), left - 2 * largest_access_bytes(layout, step) - kBoundarySlack);
  int count = 0;
  while (count < std::min(kBoundaryChunks, layout.num_chunks())) {
    const ChunkSpec& chunk = layout.chunk(count);
    room -= lasting_bytes(chunk) + chunk.num_bytes(ArrayKind::kParam) + chunk.num_bytes(ArrayKind::kGrad);
    if (room < 0) break;
    ++count;
  }
  return count;
}

// Half the room that no access needs, up to kPrefetchedChunks. Not used on the simulated device, where a fetch takes as
// long as a copy.
int64_t prefetch_bytes(const Layout& layout, const PlanProblem& problem) {
  const int64_t room = problem.limit_bytes - problem.fixed_bytes - highest_activation_memory(*problem.timeline);
  int64_t largest = 0;
  for (const ChunkSpec& chunk : layout.chunks()) largest = std::max(largest, chunk.num_bytes(ArrayKind::kParam));
  const int64_t spare = room - largest_access_bytes(layout, *problem.timeline);
  return std::clamp(spare / 2, int64_t{0}, kPrefetchedChunks * largest);
}

// kPrefetchedChunks of average size; `values`: compute values of all chunks.
int64_t usual_prefetch_bytes(const Layout& layout, int64_t values) {
  return std::min(values, kPrefetchedChunks * values / std::max(layout.num_chunks(), 1));
}

// Size above which a compute value is rare and does not fit buffers of the others; INT64_MAX if sizes vary too much for
// that.
int64_t rare_above(const Layout& layout) {
  if (is_left_out(Mechanism::kRareSizes)) return INT64_MAX;
  std::vector<int64_t> sizes;
  for (const ChunkSpec& chunk : layout.chunks()) sizes.push_back(chunk.num_bytes(ArrayKind::kParam));
  if (sizes.empty()) return INT64_MAX;
  std::sort(sizes.begin(), sizes.end());
  const int64_t served = sizes[sizes.size() / 2] + share(sizes[sizes.size() / 2], kMostDeviceBufferWaste);
  const auto num_larger = sizes.end() - std::upper_bound(sizes.begin(), sizes.end(), served);
  return static_cast<double>(num_larger) <= kRareShare * static_cast<double>(sizes.size()) ? served : INT64_MAX;
}

// By access: device buffers of rare sizes that idle until the access that needs most of them
// (memory/device_buffer_pool.h), at most half the access's free room. Empty if no size is rare.
std::vector<int64_t> idle_device_buffer_bytes(const Layout& layout, const PlanProblem& problem) {
  const int64_t above = rare_above(layout);
  const std::vector<Access>& accesses = problem.timeline->accesses;
  std::vector<int64_t> rare(accesses.size(), 0);
  std::vector<int64_t> idle(accesses.size(), 0);
  for (size_t t = 0; t < accesses.size(); ++t) {
    std::set<int> needed;
    idle[t] = room_bytes(problem, t);
    for (const ArrayUse& use : accesses[t].uses) {
      if (use.mode == ArrayUseMode::kFinalise || !needed.insert(use.array.index()).second) continue;
      const int64_t bytes = problem.arrays[static_cast<size_t>(use.array.index())].num_bytes;
      rare[t] += bytes > above ? bytes : 0;
      idle[t] -= bytes;
    }
  }
  const int64_t most = rare.empty() ? 0 : *std::max_element(rare.begin(), rare.end());
  if (most == 0) return {};
  for (size_t t = 0; t < accesses.size(); ++t) {
    idle[t] = std::clamp(idle[t] / 2, int64_t{0}, most - rare[t]);
  }
  return idle;
}

// The first gradients that wait on the device take no room of their own ([Note: gradients in activation memory]).
void put_gradients_into_activation_memory(const Layout& layout, const Timeline& step,
                                          const std::vector<uint8_t>& states_on_device, const DeviceBudget& budget,
                                          PlanProblem& problem) {
  int64_t left = budget.keeps_gradients ? budget.gradient_activation_bytes : 0;
  if (left == 0) return;
  for (const Access& access : step.accesses) {
    for (const ArrayUse& use : access.uses) {
      const bool waits = layout.row(use.array).on_device == ArrayMemory::kActivationMemory &&
                         use.mode == ArrayUseMode::kWrite &&
                         states_on_device[static_cast<size_t>(use.array.chunk)] != 0;
      int64_t& bytes = problem.arrays[static_cast<size_t>(use.array.index())].num_bytes;
      if (!waits || bytes == 0 || bytes > left) continue;
      left -= bytes;
      bytes = 0;
    }
  }
}

// Arrays that share the headroom with optimizer states.
enum class Beside : uint8_t {
  kAllValues,  // compute values of all chunks; gradients take their places
  kGradients,  // gradients that wait for the norm; compute values are fetched on demand
  kNothing,    // gradients leave the device as well
};

// Number of chunks, from the first on, whose states fit `headroom_bytes` times margin_use_ratio.
int num_state_chunks_within(const Layout& layout, const DeviceBudget& budget, int64_t headroom_bytes, Beside beside) {
  int64_t usable = share(std::max<int64_t>(headroom_bytes, 0), budget.margin_use_ratio);
  int64_t in_activation_memory = budget.gradient_activation_bytes;
  int count = 0;
  for (const ChunkSpec& chunk : layout.chunks()) {
    usable -= lasting_bytes(chunk);
    if (chunk.trainable) {
      const ArrayRow& gradient = chunk.rows.gradient();
      const ArrayRow& param = chunk.rows.param();
      const bool reserves = gradient.on_device == ArrayMemory::kOwn || (budget.keeps_gradients && chunk.is_sharded());
      // The compute value is part of the states here, and the gradient does not take its place.
      const bool is_apart = gradient.on_device == ArrayMemory::kActivationMemory;
      const bool waits = beside == Beside::kAllValues ? is_apart : beside == Beside::kGradients;
      const bool value = beside != Beside::kAllValues && is_apart;
      const bool shard =
          chunk.is_sharded() && param.on_device == ArrayMemory::kOwn;  // on one rank it counts among the values
      if (reserves || (budget.keeps_gradients && waits)) {
        const int64_t without_device_buffer = reserves ? 0 : std::min(gradient.num_bytes, in_activation_memory);
        in_activation_memory -= without_device_buffer;
        usable -= gradient.num_bytes - without_device_buffer;
      }
      if (value || shard) usable -= param.num_bytes;
    }
    if (budget.backwards == Backwards::kSeveral) usable -= accumulation_bytes(layout, count);
    if (usable < 0) break;
    ++count;
  }
  return count;
}

// Host updates that can start before the norm.
struct UpdatesAhead {
  int64_t value_bytes = 0;    // compute values of updates that can start
  int64_t waiting_bytes = 0;  // compute values of the others
};

// For chunks from `count` on, which rest on the host.
UpdatesAhead updates_ahead(const Layout& layout, const Timeline& step, const DeviceBudget& budget, int count) {
  std::vector<uint8_t> on_device(layout.chunks().size(), 0);
  std::fill_n(on_device.begin(), count, uint8_t{1});
  int64_t room = budget.host_limit_bytes - reserved_gradient_bytes(layout);
  room -= leaving_gradient_bytes(layout, step, on_device, budget);
  for (ChunkId chunk = count; chunk < layout.num_chunks(); ++chunk) room -= resting_tier_bytes(layout.chunk(chunk));
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

int64_t highest_activation_memory(const Timeline& timeline) {
  int64_t highest = 0;
  for (const Access& access : timeline.accesses) highest = std::max(highest, access.activation_peak_bytes);
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
  for (const Access& access : step.accesses) {
    int64_t others = 0;  // arrays that this access needs
    std::set<int> needed;
    for (const ArrayUse& use : access.uses) {
      if (use.mode == ArrayUseMode::kFinalise || !needed.insert(use.array.index()).second) continue;
      const bool waits = use.array.kind == ArrayKind::kGrad && layout.row(use.array).on_device != ArrayMemory::kOwn &&
                         states_on_device[static_cast<size_t>(use.array.chunk)] != 0;
      if (!waits) {
        others += layout.num_bytes(use.array);
      } else if (waiting.insert(use.array.index()).second) {
        gradients += layout.num_bytes(use.array);
      }
    }
    const int64_t in_device_buffers = std::max<int64_t>(gradients - budget.gradient_activation_bytes, 0);
    leaving = std::max(leaving, states + in_device_buffers + others + access.activation_peak_bytes - limit_bytes);
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
    // All-gathered values leave the device at the end of a step, so that all ranks start the next step alike.
    const bool survives = !spec.is_sharded() && (on_device || !spec.trainable);
    // placed_bytes() counts these rows as fixed.
    const auto bytes_beside = [&](const ArrayRow& row) {
      return on_device && row.on_device == ArrayMemory::kOwn ? 0 : row.num_bytes;
    };
    problem.arrays[static_cast<size_t>(ArrayId{chunk, param.kind}.index())] = {
        bytes_beside(param), on_device ? 0 : value.num_bytes, 0, 0, survives};
    stages = stages || (spec.is_quantized() && !on_device);
    problem.fixed_bytes += on_device ? placed : 0;
    if (!spec.trainable) continue;
    const ArrayRow& grad = spec.rows[ArrayKind::kGrad];
    const bool finalises = !on_device || param.source == Source::kMaster;
    problem.arrays[static_cast<size_t>(ArrayId{chunk, grad.kind}.index())] = {
        bytes_beside(grad), grad.num_bytes, grad.num_bytes, finalises ? value.num_bytes : 0, false};
    const bool shard_waits =
        spec.is_sharded() && budget.keeps_gradients && spec.rows.gradient().on_device != ArrayMemory::kOwn;
    if (on_device && shard_waits) problem.fixed_bytes += value.num_bytes;
    if (on_device && budget.backwards == Backwards::kSeveral) {
      problem.fixed_bytes += spec.num_bytes(ArrayKind::kGradSum);
    }
  }
  put_gradients_into_activation_memory(layout, last, states_on_device, budget, problem);
  problem.gradient_room_bytes = budget.gradient_room_bytes;
  problem.round_trips = round_trip_costs(layout);
  problem.fixed_bytes += scatter_bytes(layout);
  if (stages) problem.fixed_bytes += kStagings * largest_quantized_bytes(layout);
  if (budget.limit_bytes == INT64_MAX) return problem;
  if (!budget.follows_activations) problem.least_activation_bytes = highest_activation_memory(last);
  problem.limit_bytes = budget.limit_bytes;
  if (!budget.follows_activations) problem.idle_bytes = idle_device_buffer_bytes(layout, problem);
  if (budget.prefetches_far) problem.prefetch_bytes = prefetch_bytes(layout, problem);
  return problem;
}

int num_device_state_chunks(const Layout& layout, const Timeline& step, const DeviceBudget& budget) {
  if (budget.limit_bytes == INT64_MAX) return layout.num_chunks();
  int64_t headroom = budget.limit_bytes - highest_activation_memory(step) - scatter_bytes(layout);
  int64_t largest = 0;
  int64_t values = 0;
  int64_t own_values = 0;  // of chunks that no other rank shares
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
  // All-gathers are faster than uploads, so values of shared chunks need no more room than prefetches.
  if (layout.has_other_ranks()) values = own_values + std::min(values - own_values, kPrefetchedChunks * largest);
  const int64_t prefetched = usual_prefetch_bytes(layout, values);
  if (!budget.follows_activations)
    headroom -= std::min(share(std::max<int64_t>(headroom, 0), kDeviceBufferWasteShare), prefetched);
  const int64_t gradients = 2 * largest_trained;  // in flight; the others take their parameters' place
  const int count = num_state_chunks_within(layout, budget, headroom - values - gradients, Beside::kAllValues);
  const int64_t without_values = headroom - prefetched - gradients;  // values are fetched on demand
  const int beside = num_state_chunks_within(layout, budget, without_values, Beside::kGradients);
  const int most = num_state_chunks_within(layout, budget, without_values, Beside::kNothing);
  // States may displace gradients only if that lets enough host updates start in backward; no more states than that
  // takes.
  int enough = count;
  UpdatesAhead ahead = updates_ahead(layout, step, budget, enough);
  if (!is_enough(ahead)) {
    int too_few = count;  // a chunk frees more host memory than its gradient takes, so more chunks never do worse
    enough = std::max(count, most);
    while (enough - too_few > 1) {
      const int middle = too_few + (enough - too_few) / 2;
      (is_enough(updates_ahead(layout, step, budget, middle)) ? enough : too_few) = middle;
    }
    ahead = updates_ahead(layout, step, budget, enough);
  }
  const int chosen = enough == count || is_enough(ahead) ? enough : std::max(count, beside);
  return budget.follows_activations ? chosen : std::max(chosen, num_boundary_chunks(layout, step, budget.limit_bytes));
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
