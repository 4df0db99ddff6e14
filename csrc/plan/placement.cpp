#include "plan/placement.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <set>
#include <utility>

#include "common/check.h"
#include "memory/disk_file.h"
#include "memory/host_arena.h"
#include "memory/slot_pool.h"
#include "optim/kernels.h"

namespace patrickstar {

namespace {

// Chunks that may be on their way to the device ahead of their use, at most, where a late one makes the device wait.
constexpr int64_t kPrefetchedChunks = 16;
// Of the margin, what slots of several sizes waste at most where memory does not follow the tide, and no more than as
// much again as is kept for prefetches: a slot may be larger than what it serves (kMostSlotWaste).
constexpr double kSlotWasteShare = 0.05;
// Of what the tide leaves, what the states of the first chunks may take where those of all others stay on the host.
constexpr double kBoundaryShare = 0.45;
constexpr int kBoundaryChunks = 3;
constexpr int64_t kBoundarySlack = int64_t{128} << 20;
// Of the new values of updates on the host, these are enough: the updates of the others wait beside the next forward
// ([Note: updates that wait], plan/plan_choice.h). For fewer it is not worth it that gradients leave the device: with
// half of them GPT 18.5 B took 4.5 to 5 s on an H200, and 3.3 s without any.
constexpr double kEnoughAhead = 0.8;
// Of values in place, one of so many is expected to be open at most ([Note: values in place], optim/kernels.h).
constexpr int64_t kElementsPerOpenValue = 64;
// Quantised chunks whose codes are on the device on their way into compute values ([Note: staging], engine/pager.h).
constexpr int64_t kStagings = 2;
// A size is rare that no more than this share of the chunks have, or a larger one.
constexpr double kRareShare = 0.125;
// Compute values that are made of codes on the device which are kept free room for: more are made when they are needed.
constexpr int64_t kDequantizedChunks = 4;

int64_t share(int64_t bytes, double ratio) { return static_cast<int64_t>(static_cast<double>(bytes) * ratio); }

// What scatters need beside the gradients: room for all ranks' parts, and the shards on their way to the host.
int64_t scatter_bytes(const Layout& layout) {
  if (!layout.is_sharded()) return 0;
  int64_t largest = 0;
  for (const ChunkSpec& chunk : layout.chunks()) {
    largest = std::max(largest, chunk.num_bytes(ArrayKind::kGrad) + 2 * chunk.num_bytes(ArrayKind::kGradShard));
  }
  return largest;
}

// What a chunk keeps beside its compute value.
int64_t lasting_bytes(const ChunkSpec& chunk) { return optimizer_bytes(chunk) + chunk.quantized_bytes(); }

int64_t largest_quantized_bytes(const Layout& layout) {
  int64_t largest = 0;
  for (const ChunkSpec& chunk : layout.chunks()) largest = std::max(largest, chunk.quantized_bytes());
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
      const ChunkSpec& spec = layout.chunk(access.array.chunk);
      const bool waits = access.array.kind == ArrayKind::kGrad && access.mode == AccessMode::kWrite &&
                         spec.puts_values_in_place() && states_on_device[static_cast<size_t>(access.array.chunk)] != 0;
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
      const bool reserves = chunk.reserves_gradient() || (budget.keeps_gradients && layout.is_sharded());
      // Among all values there is the one that is a part of the states, and a gradient does not take its place.
      const bool waits = beside == Beside::kAllValues ? chunk.puts_values_in_place() : beside == Beside::kGradients;
      const bool value = beside != Beside::kAllValues && chunk.puts_values_in_place();
      const bool shard = layout.is_sharded() && chunk.keeps_param();  // of one rank it is among the values
      if (reserves || (budget.keeps_gradients && waits)) {
        const int64_t bytes = chunk.num_bytes(ArrayKind::kGradShard);
        const int64_t without_slot = reserves ? 0 : std::min(bytes, in_tide);
        in_tide -= without_slot;
        usable -= bytes - without_slot;
      }
      if (value || shard) usable -= chunk.num_bytes(ArrayKind::kParamShard);
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
    (bytes <= room ? ahead.value_bytes : ahead.waiting_bytes) += spec.num_bytes(layout.param_home());
    room -= bytes <= room ? bytes : 0;
  }
  return ahead;
}

bool is_enough(const UpdatesAhead& ahead) {
  return ahead.waiting_bytes <= share(ahead.value_bytes + ahead.waiting_bytes, 1 - kEnoughAhead);
}

// The last chunks' states, of those that take at most `most_bytes` each, until the host has room for the rest or the
// disk for no more.
InitialPlacement with_disk(const Layout& layout, int64_t host_limit_bytes, int64_t disk_limit_bytes,
                           Backwards backwards, int64_t most_bytes, InitialPlacement placement) {
  DiskSets sets;
  int64_t beside_sets = placement.host_bytes;
  for (ChunkId chunk = layout.num_chunks() - 1; chunk >= 0 && placement.host_bytes > host_limit_bytes; --chunk) {
    const int64_t bytes = disk_bytes(layout.chunk(chunk));
    if (bytes == 0 || bytes > most_bytes || placement.disk_bytes + bytes > disk_limit_bytes) continue;
    placement.homes[static_cast<size_t>(chunk)] = Tier::kDisk;
    placement.disk_bytes += bytes;
    sets.serve(layout.chunk(chunk));
    beside_sets += bytes_beside_disk(layout, chunk, backwards) - held_bytes(layout, chunk, backwards);
    placement.host_bytes = beside_sets + sets.num_bytes();
  }
  return placement;
}

// Sets are as large as the largest chunk that passes through, so a few large chunks may take more of the host than they
// leave to it. What is best is tried: the fewest bytes on the disk with which the host suffices, else the least host.
void place_on_disk(const Layout& layout, int64_t host_limit_bytes, int64_t disk_limit_bytes, Backwards backwards,
                   InitialPlacement& placement) {
  std::set<int64_t, std::greater<>> sizes;
  for (const ChunkSpec& chunk : layout.chunks()) {
    if (chunk.trainable) sizes.insert(disk_bytes(chunk));
  }
  const auto rank = [&](const InitialPlacement& found) {
    const int64_t missing = std::max<int64_t>(found.host_bytes - host_limit_bytes, 0);
    return std::make_pair(missing, found.disk_bytes);
  };
  InitialPlacement best = placement;
  for (int64_t most_bytes : sizes) {
    InitialPlacement found = with_disk(layout, host_limit_bytes, disk_limit_bytes, backwards, most_bytes, placement);
    if (rank(found) < rank(best)) best = std::move(found);
  }
  placement = std::move(best);
}

// `next`, or where that is more than `missing_bytes` the least chunk still on the host that is.
ChunkId least_enough(const Layout& layout, const std::vector<Tier>& homes, ChunkId next, int64_t missing_bytes,
                     Backwards backwards) {
  ChunkId least = next;
  for (ChunkId chunk = next + 1; chunk < layout.num_chunks(); ++chunk) {
    const int64_t bytes = held_bytes(layout, chunk, backwards);
    const bool is_on_host = homes[static_cast<size_t>(chunk)] == Tier::kHost;
    if (is_on_host && bytes >= missing_bytes && bytes < held_bytes(layout, least, backwards)) least = chunk;
  }
  return least;
}

void move_to_device(const Layout& layout, ChunkId chunk, Backwards backwards, InitialPlacement& placement) {
  placement.homes[static_cast<size_t>(chunk)] = Tier::kDevice;
  placement.host_bytes -= held_bytes(layout, chunk, backwards);
}

// Gradients that have no memory of their own until their update: chunks of such that are updated on the host.
bool updates_bound_backward(const Layout& layout) {
  const std::vector<ChunkSpec>& chunks = layout.chunks();
  return std::any_of(chunks.begin(), chunks.end(), [](const ChunkSpec& chunk) {
    return chunk.trainable && chunk.keeps_param() && !chunk.keeps_gradient();
  });
}

// [Note: homes in turn] Where a gradient on the host has memory only until its update, backward goes no faster than the
// host updates, which should therefore have something to do throughout: chunks at home on the device and on the host
// take turns, by bytes. Elsewhere the first ones go to the device, so that the others' updates have time beside the
// beginning of the next forward. Returns the room that is left.
int64_t spread_over_device(const Layout& layout, int64_t host_limit_bytes, int64_t room, Backwards backwards,
                           InitialPlacement& placement) {
  int64_t on_host = 0;
  for (ChunkId chunk = 0; chunk < layout.num_chunks(); ++chunk) {
    const bool moves = placement.homes[static_cast<size_t>(chunk)] == Tier::kHost;
    on_host += moves ? held_bytes(layout, chunk, backwards) : 0;
  }
  const int64_t excess = placement.host_bytes - host_limit_bytes;
  const double ratio = on_host == 0 ? 0 : static_cast<double>(excess) / static_cast<double>(on_host);
  double due = 0;
  for (ChunkId chunk = 0; chunk < layout.num_chunks() && placement.host_bytes > host_limit_bytes; ++chunk) {
    if (placement.homes[static_cast<size_t>(chunk)] != Tier::kHost) continue;
    const int64_t bytes = held_bytes(layout, chunk, backwards);
    due += ratio * static_cast<double>(bytes);
    if (due <= 0 || bytes > room) continue;
    due -= static_cast<double>(bytes);
    room -= bytes;
    move_to_device(layout, chunk, backwards, placement);
  }
  return room;
}

}  // namespace

int64_t highest_tide(const Timeline& timeline) {
  int64_t highest = 0;
  for (const Moment& moment : timeline.moments) highest = std::max(highest, moment.tide_peak_bytes);
  return highest;
}

int64_t leaving_gradient_bytes(const Layout& layout, const Timeline& step, const std::vector<uint8_t>& states_on_device,
                               const DeviceBudget& budget) {
  if (budget.limit_bytes == INT64_MAX || layout.is_sharded() || !budget.keeps_gradients) return 0;
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
      const ChunkSpec& spec = layout.chunk(access.array.chunk);
      if (access.mode == AccessMode::kRetire || !needed.insert(access.array.index()).second) continue;
      const bool waits = access.array.kind == ArrayKind::kGrad && !spec.reserves_gradient() &&
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

int64_t least_new_bytes(const Layout& layout, ChunkId chunk) {
  const ChunkSpec& spec = layout.chunk(chunk);
  if (spec.puts_values_in_place()) return spec.shard_numel / kElementsPerOpenValue * optim::OpenValues::kBytes;
  return layout.num_bytes({chunk, layout.param_home()});
}

int num_device_state_chunks(const Layout& layout, const Timeline& step, const DeviceBudget& budget) {
  const int count = num_margin_chunks(layout, step, budget);
  return budget.follows_tide ? count : std::max(count, num_boundary_chunks(layout, step, budget.limit_bytes));
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
    const bool trainable = layout.chunk(chunk).trainable;
    const bool quantized = layout.chunk(chunk).is_quantized();
    const bool on_device = (trainable || quantized) && states_on_device[static_cast<size_t>(chunk)] != 0;
    const ArrayId param{chunk, ArrayKind::kParam};
    const ArrayId grad{chunk, ArrayKind::kGrad};
    const int64_t bytes = layout.num_bytes(param);
    const ArrayId shard{chunk, ArrayKind::kParamShard};
    const int64_t shard_bytes = layout.num_bytes(shard);
    // Of several ranks none may have what another one lacks: all values go when the step is over.
    const bool survives = !layout.is_sharded() && (on_device || !trainable);
    const bool kept = layout.chunk(chunk).keeps_param();
    // Those of placed_bytes() are fixed; of several ranks these are the shard's.
    const int64_t param_bytes = on_device && kept && !layout.is_sharded() ? 0 : bytes;
    const int64_t fetch_bytes = layout.num_bytes(quantized ? layout.value_home(chunk) : shard);
    stages = stages || (quantized && !on_device);
    const bool retires = !on_device || (!layout.is_sharded() && !kept);
    problem.arrays[static_cast<size_t>(param.index())] = {param_bytes, on_device ? 0 : fetch_bytes, 0, 0, survives};
    const bool placed = layout.chunk(chunk).reserves_gradient();
    const int64_t grad_bytes = on_device && placed && !layout.is_sharded() ? 0 : bytes;
    problem.arrays[static_cast<size_t>(grad.index())] = {grad_bytes, bytes, bytes, retires ? shard_bytes : 0, false};
    if (on_device) problem.fixed_bytes += placed_bytes(layout.chunk(chunk));
    const bool shard_waits = trainable && layout.is_sharded() && budget.keeps_gradients && !placed;
    if (on_device && shard_waits) problem.fixed_bytes += shard_bytes;
    if (on_device && trainable && budget.backwards == Backwards::kSeveral) {
      problem.fixed_bytes += layout.num_bytes({chunk, ArrayKind::kGradSum});
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

int64_t optimizer_bytes(const ChunkSpec& chunk) {
  int64_t bytes = 0;
  if (!chunk.trainable) return bytes;
  for (ArrayKind kind : chunk.state_kinds()) bytes += chunk.num_bytes(kind);
  return bytes;
}

int64_t home_bytes(const ChunkSpec& chunk) {
  if (chunk.is_quantized()) return chunk.quantized_bytes();
  const int64_t gradient = chunk.keeps_gradient() ? chunk.num_bytes(ArrayKind::kGradShard) : 0;
  return optimizer_bytes(chunk) + chunk.num_bytes(ArrayKind::kParamShard) + gradient;
}

int64_t accumulation_bytes(const Layout& layout, ChunkId chunk) {
  const ChunkSpec& spec = layout.chunk(chunk);
  if (!spec.trainable) return 0;
  const int64_t rounding = HostArena::most_rounding_bytes(0);  // of the two, each mapped when it is needed
  const int64_t gradient = spec.keeps_gradient() ? 0 : spec.num_bytes(layout.grad_home());  // else at home
  return spec.num_bytes(ArrayKind::kGradSum) + gradient + rounding;
}

int64_t held_bytes(const Layout& layout, ChunkId chunk, Backwards backwards) {
  const int64_t home = home_bytes(layout.chunk(chunk));
  return backwards == Backwards::kSeveral ? home + accumulation_bytes(layout, chunk) : home;
}

int64_t placed_bytes(const ChunkSpec& chunk) {
  if (chunk.is_quantized()) return chunk.quantized_bytes();
  if (chunk.derives_param() || !chunk.trainable) return optimizer_bytes(chunk);
  return chunk.puts_values_in_place() ? home_bytes(chunk) - chunk.num_bytes(ArrayKind::kGradShard) : home_bytes(chunk);
}

int64_t spare_bytes(const Layout& layout) {
  int64_t total = 0;
  int64_t largest = 0;
  for (const ChunkSpec& chunk : layout.chunks()) {
    total += home_bytes(chunk);
    const int count = chunk.trainable && !chunk.derives_param() && !chunk.keeps_gradient() ? 2 : 1;
    const int64_t passing = chunk.is_quantized() ? chunk.quantized_bytes() : chunk.num_bytes(layout.grad_home());
    largest = std::max(largest, count * passing);
  }
  return largest + HostArena::most_rounding_bytes(total);
}

int64_t disk_bytes(const ChunkSpec& chunk) {
  int64_t bytes = 0;
  if (!chunk.trainable) return bytes;
  for (ArrayKind kind : chunk.state_kinds()) bytes += DiskFile::round_up(chunk.num_bytes(kind));
  return bytes;
}

int64_t bytes_beside_disk(const Layout& layout, ChunkId chunk, Backwards backwards) {
  const ChunkSpec& spec = layout.chunk(chunk);
  const int64_t bytes = held_bytes(layout, chunk, backwards) - optimizer_bytes(spec);
  if (spec.derives_param() || spec.keeps_gradient()) return bytes;
  return bytes + spec.num_bytes(layout.grad_home()) + HostArena::most_rounding_bytes(0);  // mapped when it is needed
}

int64_t DiskSets::num_bytes() const {
  const int64_t bytes = count * (block_bytes[0] + block_bytes[1] + block_bytes[2]);
  return count == 0 ? 0 : bytes + HostArena::most_rounding_bytes(bytes);
}

void DiskSets::serve(const ChunkSpec& chunk) {
  count = std::min(count + 1, kNumDiskSets);
  auto bytes = block_bytes.begin();
  for (ArrayKind kind : optimizer_arrays()) {
    *bytes = std::max(*bytes, DiskFile::round_up(chunk.num_bytes(kind)));
    ++bytes;
  }
}

DiskSets disk_sets(const Layout& layout, const std::vector<Tier>& homes) {
  DiskSets sets;
  for (ChunkId chunk = 0; chunk < layout.num_chunks(); ++chunk) {
    if (homes[static_cast<size_t>(chunk)] == Tier::kDisk) sets.serve(layout.chunk(chunk));
  }
  return sets;
}

std::vector<ChunkId> home_from_disk(const Layout& layout, const std::vector<Tier>& homes, int64_t room_bytes) {
  std::vector<ChunkId> chunks;
  for (ChunkId chunk = 0; chunk < layout.num_chunks(); ++chunk) {
    const int64_t bytes = optimizer_bytes(layout.chunk(chunk)) + HostArena::most_rounding_bytes(0);
    if (homes[static_cast<size_t>(chunk)] != Tier::kDisk || bytes > room_bytes) continue;
    chunks.push_back(chunk);
    room_bytes -= bytes;
  }
  return chunks;
}

InitialPlacement initial_placement(const Layout& layout, int64_t host_limit_bytes, int64_t device_room_bytes,
                                   Backwards backwards, int64_t disk_limit_bytes) {
  InitialPlacement result;
  result.host_bytes = spare_bytes(layout);
  for (ChunkId chunk = 0; chunk < layout.num_chunks(); ++chunk) {
    result.host_bytes += held_bytes(layout, chunk, backwards);
  }
  result.homes.assign(layout.chunks().size(), Tier::kHost);
  if (disk_limit_bytes > 0) place_on_disk(layout, host_limit_bytes, disk_limit_bytes, backwards, result);
  int64_t room = device_room_bytes;
  if (updates_bound_backward(layout)) room = spread_over_device(layout, host_limit_bytes, room, backwards, result);
  for (ChunkId next = 0; next < layout.num_chunks() && result.host_bytes > host_limit_bytes; ++next) {
    const ChunkId chunk = least_enough(layout, result.homes, next, result.host_bytes - host_limit_bytes, backwards);
    const int64_t bytes = held_bytes(layout, chunk, backwards);
    if (bytes > room || result.homes[static_cast<size_t>(chunk)] != Tier::kHost) continue;
    move_to_device(layout, chunk, backwards, result);
    room -= bytes;
  }
  // Frozen values are written on the host first.
  bool needs_spare = false;
  for (ChunkId chunk = 0; chunk < layout.num_chunks(); ++chunk) {
    const bool is_on_host = result.homes[static_cast<size_t>(chunk)] != Tier::kDevice;
    needs_spare = needs_spare || is_on_host || !layout.chunk(chunk).trainable;
  }
  if (!needs_spare) result.host_bytes = 0;
  return result;
}

int64_t gradient_room_bytes(const Layout& layout, const std::vector<Tier>& homes, int64_t host_limit_bytes) {
  if (!updates_bound_backward(layout)) return INT64_MAX;
  int64_t room = host_limit_bytes - disk_sets(layout, homes).num_bytes();
  for (ChunkId chunk = 0; chunk < layout.num_chunks(); ++chunk) {
    const Tier home = homes[static_cast<size_t>(chunk)];
    if (home == Tier::kHost) room -= home_bytes(layout.chunk(chunk));
    if (home == Tier::kDisk) room -= bytes_beside_disk(layout, chunk, Backwards::kOne);
  }
  return std::max<int64_t>(room, 0);
}

int64_t visiting_piece_bytes(const Layout& layout) {
  constexpr int64_t kArrays = 7;  // data and scales of three states, and a value: each begins anew
  int64_t largest = 0;
  for (const ChunkSpec& chunk : layout.chunks()) {
    if (!chunk.trainable) continue;
    const int64_t numel = std::min(chunk.shard_numel, kVisitingPiece);
    int64_t bytes = numel * element_size(chunk.dtype) + kArrays * kVisitorAlignment;
    for (ArrayKind kind : chunk.state_kinds()) bytes += state_bytes(chunk.states.of(kind), numel);
    largest = std::max(largest, bytes);
  }
  return largest;
}

int64_t visitor_bytes(const Layout& layout) { return kNumVisitors * visiting_piece_bytes(layout); }

std::vector<VisitCost> visit_costs(const Layout& layout) {
  std::vector<VisitCost> costs;
  for (const ChunkSpec& chunk : layout.chunks()) {
    const int64_t states = optimizer_bytes(chunk);
    const int64_t value = chunk.num_bytes(ArrayKind::kParamShard);
    costs.push_back({states + (chunk.keeps_param() ? value : 0), states + value});
  }
  return costs;
}

int64_t reserved_gradient_bytes(const Layout& layout) {
  std::vector<int64_t> sizes;
  bool have_places = true;
  for (const ChunkSpec& chunk : layout.chunks()) {
    sizes.push_back(chunk.num_bytes(layout.grad_home()));
    have_places = have_places && (chunk.puts_values_in_place() || !chunk.trainable);
  }
  const int most = have_places ? 1 : kNumReservedGradients;
  const auto count = std::min<ptrdiff_t>(most, static_cast<ptrdiff_t>(sizes.size()));
  std::partial_sort(sizes.begin(), sizes.begin() + count, sizes.end(), std::greater<>());
  return std::accumulate(sizes.begin(), sizes.begin() + count, int64_t{0});
}

int num_margin_chunks(const Layout& layout, const Timeline& step, const DeviceBudget& budget) {
  if (budget.limit_bytes == INT64_MAX) return layout.num_chunks();
  int64_t margin = budget.limit_bytes - highest_tide(step) - scatter_bytes(layout);
  int64_t largest = 0;
  int64_t values = 0;
  int64_t largest_trained = 0;
  int64_t dequantized = 0;
  int64_t largest_dequantized = 0;
  for (const ChunkSpec& chunk : layout.chunks()) {
    const int64_t bytes = chunk.num_bytes(ArrayKind::kParam);
    (chunk.is_quantized() ? dequantized : values) += bytes;
    largest = std::max(largest, bytes);
    if (chunk.trainable) largest_trained = std::max(largest_trained, bytes);
    if (chunk.is_quantized()) largest_dequantized = std::max(largest_dequantized, bytes);
  }
  values += std::min(dequantized, kDequantizedChunks * largest_dequantized);
  values += kStagings * largest_quantized_bytes(layout);
  // Of several ranks each has the others to get values from, which is faster than the host.
  if (layout.is_sharded()) values = std::min(values, kPrefetchedChunks * largest);
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
  return enough == count || is_enough(ahead) ? enough : std::max(count, beside);
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
