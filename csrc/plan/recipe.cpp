#include "plan/recipe.h"

#include <algorithm>

namespace patrickstar {

bool any_round_trips(const std::vector<Recipe>& recipes) {
  return std::any_of(recipes.begin(), recipes.end(), [](Recipe recipe) { return is_round_trip(row_of(recipe)); });
}

Recipe with_round_trip(Recipe recipe) { return recipe == Recipe::kHostCommitted ? Recipe::kRoundTrip : recipe; }

Recipe without_round_trip(Recipe recipe) { return is_round_trip(row_of(recipe)) ? Recipe::kHostCommitted : recipe; }

Recipe made_deferred(Recipe recipe) { return row_of(recipe).start == Start::kAhead ? Recipe::kHost : recipe; }

Recipe later_of(Recipe planned, Recipe possible, UpdateUnit unit) {
  if (row_of(planned).states != row_of(possible).states) return possible;
  const Recipe later = std::max(planned, possible);
  return unit == UpdateUnit::kElement || suits_matrices(row_of(later)) ? later : possible;
}

Recipe after_norm(Recipe recipe) {
  const RecipeRow& row = row_of(recipe);
  if (!starts_in_backward(row)) return recipe;
  if (row.states == Tier::kDevice) return Recipe::kDevice;
  if (row.states == Tier::kDisk) return Recipe::kDisk;
  return row.start == Start::kAhead ? Recipe::kHostTwoPasses : Recipe::kHost;
}

Recipe earliest_recipe(const UpdatedChunk& chunk, UpdateStart start, ExpectedScale scale) {
  if (!chunk.trainable) return Recipe::kNever;
  const bool commits = start == UpdateStart::kCommitted;
  if (chunk.states == Tier::kDevice) return commits ? Recipe::kDeviceCommitted : Recipe::kDevice;
  if (chunk.states == Tier::kDisk) return commits ? Recipe::kDiskCommitted : Recipe::kDisk;
  if (commits) return Recipe::kHostCommitted;
  if (chunk.ahead == Ahead::kNothing || chunk.unit == UpdateUnit::kMatrix) return Recipe::kHost;
  if (start == UpdateStart::kAfterNorm) return Recipe::kHostTwoPasses;
  const bool is_exact = scale == ExpectedScale::kExact;
  if (is_exact && chunk.ahead == Ahead::kEverything) return Recipe::kHostAhead;
  // In float32 almost every value depends on the scale.
  return is_exact || chunk.dtype != DType::kFloat32 ? Recipe::kHostTwoPassesAhead : Recipe::kHostTwoPasses;
}

}  // namespace patrickstar
