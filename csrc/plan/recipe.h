// Recipes: all ways in which a chunk may be updated, as rows of one table. Planner and engine choose a recipe for each
// chunk, the engine carries it out, and the simulator times it; all three read the row's fields.
//
//   const RecipeRow& row = row_of(recipe);
//   row.start == Start::kAhead   // begins in backward, and is undone where the step is another one
//
// How new values are undone follows from the layout: memory of their own is freed, values in place are written again
// ([Note: values in place], optim/kernels.h). Pure functions of sizes.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "common/dtype.h"
#include "common/types.h"
#include "plan/host_demand.h"

namespace patrickstar {

// When an update begins.
enum class Start : uint8_t {
  kNever,
  kPromised,   // in backward and for good, as an optimizer in backward does ([Note: committed updates])
  kAhead,      // in backward, before the norm is known ([Note: exact speculation])
  kAfterNorm,  // when the norm of all gradients is known
};

enum class Passes : uint8_t {
  kOne,
  kTwo,  // the new compute value first, and states behind it ([Note: parameters first], engine/update_jobs.h)
};

struct UpdateWay {
  Start start;
  Tier states;   // home of the chunk's optimizer states
  Tier updater;  // side that computes: kHost or kDevice
  Passes passes = Passes::kOne;

  friend constexpr bool operator==(const UpdateWay& a, const UpdateWay& b) {
    return a.start == b.start && a.states == b.states && a.updater == b.updater && a.passes == b.passes;
  }
};

// Rows. Within one home of states a later row begins later; ranks agree on the latest one ([Note: one plan on all
// ranks]).
enum class Recipe : uint8_t {
  kNever,  // frozen
  kHostPromised,
  kVisit,  // states go to the device and come back ([Note: visits])
  kHostAhead,
  kHostTwoPassesAhead,
  kHostTwoPasses,
  kHost,
  kDiskPromised,
  kDisk,
  kDevicePromised,
  kDevice,
};
constexpr size_t kNumRecipes = 11;

struct RecipeRow : UpdateWay {
  const char* name;
};

constexpr std::array<RecipeRow, kNumRecipes> kRecipes{{
    {{Start::kNever, Tier::kHost, Tier::kHost, Passes::kOne}, "NEVER"},
    {{Start::kPromised, Tier::kHost, Tier::kHost, Passes::kOne}, "HOST_PROMISED"},
    {{Start::kPromised, Tier::kHost, Tier::kDevice, Passes::kOne}, "VISIT"},
    {{Start::kAhead, Tier::kHost, Tier::kHost, Passes::kOne}, "HOST_AHEAD"},
    {{Start::kAhead, Tier::kHost, Tier::kHost, Passes::kTwo}, "HOST_TWO_PASSES_AHEAD"},
    {{Start::kAfterNorm, Tier::kHost, Tier::kHost, Passes::kTwo}, "HOST_TWO_PASSES"},
    {{Start::kAfterNorm, Tier::kHost, Tier::kHost, Passes::kOne}, "HOST"},
    {{Start::kPromised, Tier::kDisk, Tier::kHost, Passes::kOne}, "DISK_PROMISED"},
    {{Start::kAfterNorm, Tier::kDisk, Tier::kHost, Passes::kOne}, "DISK"},
    {{Start::kPromised, Tier::kDevice, Tier::kDevice, Passes::kOne}, "DEVICE_PROMISED"},
    {{Start::kAfterNorm, Tier::kDevice, Tier::kDevice, Passes::kOne}, "DEVICE"},
}};

constexpr const RecipeRow& row_of(Recipe recipe) { return kRecipes[static_cast<size_t>(recipe)]; }
// The row of an update that is made in this way.
constexpr Recipe recipe_of(const UpdateWay& way) {
  size_t index = 0;
  while (index + 1 < kNumRecipes && !(kRecipes[index] == way)) ++index;
  return static_cast<Recipe>(index);
}
constexpr bool starts_in_backward(const RecipeRow& row) {
  return row.start == Start::kPromised || row.start == Start::kAhead;
}
constexpr bool is_visit(const RecipeRow& row) { return row.states == Tier::kHost && row.updater == Tier::kDevice; }

// True where any chunk's update is a visit.
bool any_visits(const std::vector<Recipe>& recipes);
// A promised update on the host, made by a visit instead, and the other way round; other recipes as they are.
Recipe with_visit(Recipe recipe);
Recipe without_visit(Recipe recipe);
// Unit of an update: elements, so that it may be cut anywhere, or whole matrices (optim/matrix_rule.h).
enum class UpdateUnit : uint8_t { kElement, kMatrix };

// True where whole matrices can be updated so: once, where their states are, and never undone.
constexpr bool suits_matrices(const RecipeRow& row) {
  return row.start != Start::kAhead && row.passes == Passes::kOne && !is_visit(row);
}

// The later of two, or `possible` where the states have moved since `planned` was chosen, or `planned` does not suit.
Recipe later_of(Recipe planned, Recipe possible, UpdateUnit unit);
// Recipe of a chunk whose update was to begin in backward and did not, or must not.
Recipe after_norm(Recipe recipe);
// An update ahead of the norm waits for it, and is made in one pass ([Note: updates that wait], plan/plan_choice.h).
Recipe made_late(Recipe recipe);

// The earliest start of updates in a step.
enum class UpdateStart : uint8_t {
  kAfterNorm,
  kSpeculative,  // Start::kAhead, as far as there is memory for new values
  kCommitted,    // Start::kPromised
};

// The scale of gradients that speculative updates are made for.
enum class ExpectedScale : uint8_t {
  kExact,    // one number: clipping has not acted of late
  kBetween,  // one of several, since it has: values in 16 bits that are the same for all ([Note: settled values])
};

// A chunk before a step.
struct UpdatedChunk {
  bool trainable = true;
  DType dtype = DType::kFloat32;  // compute dtype
  Tier states = Tier::kHost;      // home of its optimizer states
  Ahead ahead = Ahead::kNothing;  // new values for which there is memory
  UpdateUnit unit = UpdateUnit::kElement;
};

// The recipe that begins earliest of those that there is memory for.
Recipe earliest_recipe(const UpdatedChunk& chunk, UpdateStart start, ExpectedScale scale);

}  // namespace patrickstar
