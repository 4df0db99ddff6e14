// Instructions of a step, and the rules that emit them: how an array reaches the device and leaves it, and how a
// complete gradient is reduced, sent to its update, or consumed.
//
//   for (const Instruction& instruction : arrival(array, Origin::kHost, Sharing::kOwn, Issue::kNow)) run(instruction);
//
// Compiler (plan/program.h) and engine call the same rules, so planned and on-demand transfers behave alike. The engine
// calls them in Pager and GradientFlow; deferred_update() is the compiler's alone. A new mechanism needs a row of kOps,
// a line in a rule, a case where the engine carries it out and a duration in the Clock (plan/clock.h). Pure functions.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "common/types.h"
#include "plan/recipe.h"

namespace patrickstar {

enum class Op : uint8_t {
  kBegin,
  kRecall,
  kCompute,
  kOffload,
  kAllocate,
  kFetch,
  kCast,
  kDequantize,
  kGather,
  kAwait,
  kEvict,
  kScatter,
  kAwaitRoom,
  kToHost,
  kInherit,
  kFree,
  kNorm,
  kUpdateHost,
  kUpdateHostParam,
  kUpdateHostStates,
  kUpdateDevice,
  kLoad,
  kUpdateDisk,
  kStore,
  kRoundTripUp,
  kRoundTripDown,
};
constexpr size_t kNumOps = 26;

enum class Operand : uint8_t { kAccess, kArray, kChunk, kNone };

// The queue or worker that is busy with an instruction.
enum class Lane : uint8_t {
  kLaunch,  // takes no time
  kCompute,
  kUpload,
  kDownload,
  kGather,
  kScatter,
  kHost,
  kDiskRead,
  kDiskHost,  // updates chunks whose states are on the disk
  kDiskWrite,
  kRoundTrip,
};

// Size of an instruction: bytes moved, or parameters updated.
enum class Amount : uint8_t {
  kNone,
  kFetched,        // ArrayCost::fetch_bytes
  kEvicted,        // ArrayCost::evict_bytes
  kFinalised,      // ArrayCost::finalise_bytes
  kMemory,         // of the array
  kOthers,         // other ranks' parts of the array
  kRead,           // read by dequantisation
  kComing,         // activations that return
  kLeaving,        // activations that leave
  kParams,         // of the chunk
  kDisk,           // states of the chunk
  kRoundTripUp,    // RoundTripCost::up_bytes
  kRoundTripDown,  // RoundTripCost::down_bytes
};

struct OpRow {
  const char* name;
  Operand operand;
  Lane lane;
  Amount amount;
};

constexpr std::array<OpRow, kNumOps> kOps{{
    {"begin", Operand::kAccess, Lane::kLaunch, Amount::kNone},
    {"recall", Operand::kAccess, Lane::kUpload, Amount::kComing},  // activations return
    {"compute", Operand::kAccess, Lane::kCompute, Amount::kNone},
    {"offload", Operand::kAccess, Lane::kDownload, Amount::kLeaving},  // activations leave
    {"allocate", Operand::kArray, Lane::kLaunch, Amount::kMemory},
    {"fetch", Operand::kArray, Lane::kUpload, Amount::kFetched},  // dequantisation included
    {"cast", Operand::kArray, Lane::kCompute, Amount::kNone},     // cast or copy of a value on the device
    {"dequantize", Operand::kArray, Lane::kCompute, Amount::kRead},
    {"gather", Operand::kArray, Lane::kGather, Amount::kOthers},
    {"await", Operand::kArray, Lane::kLaunch, Amount::kNone},  // a value fetched ahead is needed
    {"evict", Operand::kArray, Lane::kDownload, Amount::kEvicted},
    {"scatter", Operand::kArray, Lane::kScatter, Amount::kOthers},
    {"await_room", Operand::kArray, Lane::kLaunch, Amount::kFinalised},  // host memory for a gradient
    {"to_host", Operand::kArray, Lane::kDownload, Amount::kFinalised},   // a gradient, to the tier of its update
    {"inherit", Operand::kArray, Lane::kLaunch, Amount::kMemory},        // a new parameter takes its gradient's memory
    {"free", Operand::kArray, Lane::kLaunch, Amount::kMemory},
    {"norm", Operand::kNone, Lane::kCompute, Amount::kNone},
    {"update_host", Operand::kChunk, Lane::kHost, Amount::kParams},
    {"update_host_param", Operand::kChunk, Lane::kHost, Amount::kParams},   // phase one of two, update_jobs.h
    {"update_host_states", Operand::kChunk, Lane::kHost, Amount::kParams},  // phase two
    {"update_device", Operand::kChunk, Lane::kCompute, Amount::kParams},
    {"load", Operand::kChunk, Lane::kDiskRead, Amount::kDisk},
    {"update_disk", Operand::kChunk, Lane::kDiskHost, Amount::kParams},
    {"store", Operand::kChunk, Lane::kDiskWrite, Amount::kDisk},
    {"round_trip_up", Operand::kChunk, Lane::kRoundTrip, Amount::kRoundTripUp},  // device update included
    {"round_trip_down", Operand::kChunk, Lane::kRoundTrip, Amount::kRoundTripDown},
}};
constexpr const OpRow& row_of(Op op) { return kOps[static_cast<size_t>(op)]; }

enum class Issue : uint8_t {
  kNow,
  kAhead,  // when its inputs are ready: a prefetch, or an update in backward
};

struct Instruction {
  Op op = Op::kBegin;
  Issue issue = Issue::kNow;
  int32_t operand = 0;  // index of an access (timeline), array (ArrayId::index) or chunk

  // -1 for operands that are neither arrays nor chunks.
  ChunkId chunk() const {
    const Operand kind = row_of(op).operand;
    if (kind == Operand::kArray) return ArrayId::from_index(operand).chunk;
    return kind == Operand::kChunk ? operand : -1;
  }
};

// Instructions of one rule, in order.
class Emitted {
 public:
  constexpr void add(Op op, int operand, Issue issue = Issue::kNow) {
    instructions_.at(size_++) = {op, issue, operand};
  }
  constexpr const Instruction* begin() const { return instructions_.data(); }
  constexpr const Instruction* end() const { return instructions_.data() + size_; }

 private:
  static constexpr size_t kMost = 10;
  std::array<Instruction, kMost> instructions_{};
  size_t size_ = 0;
};

// Source of an array that comes to the device.
enum class Origin : uint8_t {
  kHost,    // a host copy, or codes there
  kDevice,  // a master, or this rank's shard
  kCodes,   // codes on the device
};
enum class Sharing : uint8_t { kOwn, kShared };

inline Emitted arrival(int array, Origin origin, Sharing sharing, Issue issue) {
  Emitted result;
  result.add(Op::kAllocate, array, issue);
  result.add(origin == Origin::kHost     ? Op::kFetch
             : origin == Origin::kDevice ? Op::kCast
                                         : Op::kDequantize,
             array, issue);
  if (sharing == Sharing::kShared) result.add(Op::kGather, array, issue);
  return result;
}

// State of an evicted array's value.
enum class Copy : uint8_t {
  kOnly,
  kElsewhere,  // another copy exists, or the value can be made again
};

inline Emitted departure(int array, Copy copy) {
  Emitted result;
  if (copy == Copy::kOnly) result.add(Op::kEvict, array);
  result.add(Op::kFree, array);
  return result;
}

struct Finalisation {
  ChunkId chunk = -1;
  Recipe update = Recipe::kNever;
  Sharing sharing = Sharing::kOwn;
  bool value_is_dead = false;   // its parameters are on the device and unused until the update
  bool value_is_taken = false;  // by a round-trip update, from the device
  bool leaves = false;          // the gradient, for an update on another tier
  bool is_last = true;          // last backward of the step: the update may begin
};

// The update that the recipe prescribes; phase one of a two-phase update.
inline void add_update(ChunkId chunk, const RecipeRow& row, Issue issue, Emitted& result) {
  switch (row.states) {
    case Tier::kDevice:
      return result.add(Op::kUpdateDevice, chunk);
    case Tier::kDisk:
      result.add(Op::kLoad, chunk);
      result.add(Op::kUpdateDisk, chunk);
      return result.add(Op::kStore, chunk);
    case Tier::kHost:
      return result.add(row.passes == Passes::kOne ? Op::kUpdateHost : Op::kUpdateHostParam, chunk, issue);
  }
}

inline Emitted finalisation(const Finalisation& finalised) {
  const RecipeRow& row = row_of(finalised.update);
  const int param = ArrayId{finalised.chunk, ArrayKind::kParam}.index();
  const int grad = ArrayId{finalised.chunk, ArrayKind::kGrad}.index();
  const bool is_shared = finalised.sharing == Sharing::kShared;
  const bool round_trips = is_round_trip(row) && finalised.is_last;
  const bool is_taken = round_trips && finalised.value_is_taken;
  Emitted result;
  if (finalised.value_is_dead && !is_taken) result.add(Op::kFree, param);
  if (round_trips) {
    if (is_shared) result.add(Op::kScatter, grad);
    result.add(Op::kRoundTripUp, finalised.chunk);
    result.add(Op::kRoundTripDown, finalised.chunk);
    if (finalised.value_is_dead && is_taken) result.add(Op::kFree, param);
    result.add(Op::kFree, grad);
    return result;
  }
  const bool starts = starts_in_backward(row) && finalised.is_last;
  if (starts && row.states == Tier::kHost && row.passes == Passes::kOne) result.add(Op::kAwaitRoom, grad);
  if (is_shared) {
    result.add(Op::kScatter, grad);
    result.add(Op::kFree, grad);  // the shard is downloaded from memory of its own
  }
  if (finalised.leaves) result.add(Op::kToHost, grad);
  if (finalised.leaves && !is_shared) result.add(Op::kFree, grad);
  if (starts) add_update(finalised.chunk, row, Issue::kAhead, result);
  return result;
}

// An update that starts after the norm.
inline Emitted deferred_update(ChunkId chunk, Recipe recipe) {
  Emitted result;
  if (row_of(recipe).start == Start::kAfterNorm) add_update(chunk, row_of(recipe), Issue::kNow, result);
  return result;
}

}  // namespace patrickstar
