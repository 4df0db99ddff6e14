// Recipes: every way to update a chunk, one row each. Planner and engine choose a recipe per chunk, the engine executes
// it, the simulator times it.
//
//   const RecipeRow& row = row_of(recipe);
//   row.start == Start::kAhead   // starts in backward; rolled back if clipping changes the update
//
// Rollback follows from the layout: separate new values are freed, in-place ones are rewritten (optim/kernels.h). Pure
// functions of sizes.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "common/dtype.h"
#include "common/types.h"
#include "plan/chunk_bytes.h"
#include "plan/host_demand.h"

namespace patrickstar {

// When an update starts.
enum class Start : uint8_t {
  kNever,
  kCommitted,  // in backward, never rolled back: optimizer-in-backward (engine/updates.h)
  kAhead,      // in backward, before the norm is known: speculative (engine/speculation.h)
  kAfterNorm,  // once the norm of all gradients is known
};

enum class Passes : uint8_t {
  kOne,
  kTwo,  // new compute value first, then states (engine/update_jobs.h)
};

struct UpdateWay {
  Start start;
  Tier states;   // resting tier of the optimizer states
  Tier updater;  // kHost or kDevice: the side that computes
  Passes passes = Passes::kOne;

  friend constexpr bool operator==(const UpdateWay& a, const UpdateWay& b) {
    return a.start == b.start && a.states == b.states && a.updater == b.updater && a.passes == b.passes;
  }
};

// Within one tier of states, a later row starts no earlier. Ranks agree on the latest one (plan/plan_vote.h).
enum class Recipe : uint8_t {
  kNever,  // frozen
  kHostCommitted,
  kRoundTrip,  // GPU round trip: states go up and come back (engine/round_trips.h)
  kHostAhead,
  kHostTwoPassesAhead,
  kHostTwoPasses,
  kHost,
  kDiskCommitted,
  kDisk,
  kDeviceCommitted,
  kDevice,
};
constexpr size_t kNumRecipes = 11;

struct RecipeRow : UpdateWay {
  const char* name;
};

constexpr std::array<RecipeRow, kNumRecipes> kRecipes{{
    {{Start::kNever, Tier::kHost, Tier::kHost, Passes::kOne}, "NEVER"},
    {{Start::kCommitted, Tier::kHost, Tier::kHost, Passes::kOne}, "HOST_COMMITTED"},
    {{Start::kCommitted, Tier::kHost, Tier::kDevice, Passes::kOne}, "ROUND_TRIP"},
    {{Start::kAhead, Tier::kHost, Tier::kHost, Passes::kOne}, "HOST_AHEAD"},
    {{Start::kAhead, Tier::kHost, Tier::kHost, Passes::kTwo}, "HOST_TWO_PASSES_AHEAD"},
    {{Start::kAfterNorm, Tier::kHost, Tier::kHost, Passes::kTwo}, "HOST_TWO_PASSES"},
    {{Start::kAfterNorm, Tier::kHost, Tier::kHost, Passes::kOne}, "HOST"},
    {{Start::kCommitted, Tier::kDisk, Tier::kHost, Passes::kOne}, "DISK_COMMITTED"},
    {{Start::kAfterNorm, Tier::kDisk, Tier::kHost, Passes::kOne}, "DISK"},
    {{Start::kCommitted, Tier::kDevice, Tier::kDevice, Passes::kOne}, "DEVICE_COMMITTED"},
    {{Start::kAfterNorm, Tier::kDevice, Tier::kDevice, Passes::kOne}, "DEVICE"},
}};

constexpr const RecipeRow& row_of(Recipe recipe) { return kRecipes[static_cast<size_t>(recipe)]; }
constexpr Recipe recipe_of(const UpdateWay& way) {
  size_t index = 0;
  while (index + 1 < kNumRecipes && !(kRecipes[index] == way)) ++index;
  return static_cast<Recipe>(index);
}
constexpr bool starts_in_backward(const RecipeRow& row) {
  return row.start == Start::kCommitted || row.start == Start::kAhead;
}
constexpr bool is_round_trip(const RecipeRow& row) { return row.states == Tier::kHost && row.updater == Tier::kDevice; }

bool any_round_trips(const std::vector<Recipe>& recipes);
// Switches a host optimizer-in-backward update to a round trip, and back; other recipes stay.
Recipe with_round_trip(Recipe recipe);
Recipe without_round_trip(Recipe recipe);
// Elements (may be cut anywhere) or whole matrices (optim/matrix_rule.h).
enum class UpdateUnit : uint8_t { kElement, kMatrix };

// Whole matrices are updated in one pass on the tier of their states, and never rolled back.
constexpr bool suits_matrices(const RecipeRow& row) {
  return row.start != Start::kAhead && row.passes == Passes::kOne && !is_round_trip(row);
}

// Returns the later of two recipes, or `possible` if states moved since `planned` was chosen, or if the later one does
// not suit whole matrices.
Recipe later_of(Recipe planned, Recipe possible, UpdateUnit unit);
// For a chunk whose update did not start in backward, or must not.
Recipe after_norm(Recipe recipe);
// Defers a speculative update: after the norm, in one pass (choose_plan, plan/plan_choice.h).
Recipe made_deferred(Recipe recipe);

// Possibility to undo an update whose step turns out different.
enum class Rollback : uint8_t {
  kPossible,
  kImpossible,
};

// Earliest update start that a step allows.
enum class UpdateStart : uint8_t {
  kAfterNorm,
  kSpeculative,  // Start::kAhead, as far as new values fit memory; rolled back if the step differs
  kCommitted,    // Start::kCommitted; the caller guarantees the expected step
};

// Speculative updates wait for the norm in two cases. With several micro-batches, it is not known which backward
// completes a gradient. A master that is the parameter is overwritten, and only split masters can be rolled back.
constexpr UpdateStart possible_start(UpdateStart wanted, Backwards backwards, Rollback rollback) {
  const bool waits = backwards == Backwards::kSeveral || rollback == Rollback::kImpossible;
  return waits && wanted == UpdateStart::kSpeculative ? UpdateStart::kAfterNorm : wanted;
}

// Gradient scale that speculative updates assume.
enum class ExpectedScale : uint8_t {
  kExact,    // one value: clipping has not acted lately
  kBetween,  // a range: only 16-bit values that are the same for the whole range (optim/kernels.h)
};

// A chunk before a step.
struct UpdatedChunk {
  bool trainable = true;
  DType dtype = DType::kFloat32;  // compute dtype
  Tier states = Tier::kHost;      // resting tier of its optimizer states
  Ahead ahead = Ahead::kNothing;  // new values that fit memory
  UpdateUnit unit = UpdateUnit::kElement;
};

// The earliest-starting recipe that fits memory.
Recipe earliest_recipe(const UpdatedChunk& chunk, UpdateStart start, ExpectedScale scale);

}  // namespace patrickstar
