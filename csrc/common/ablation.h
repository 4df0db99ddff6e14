// Mechanisms that a measurement leaves out (benchmark/ablation.py): what each one buys is known from steps without it
// alone. Results have the same bits with and without.
#pragma once

#include <atomic>
#include <cstdint>

namespace patrickstar {

enum class Mechanism : uint8_t {
  kWholeUpdatesAhead,  // Ahead::kEverything
  kParametersFirst,    // Ahead::kParam, and updates of the step in two passes
  kSettledValues,
  kWaitingUpdates,
  kOrderOfNeed,
  kHomesInTurn,
  kVisits,
  kRareSizes,
  kExactSlots,
};

// One bit per mechanism; of the process, read when a step is planned or an update is made.
inline std::atomic<uint32_t> left_out_mechanisms{0};

inline void set_left_out(uint32_t mechanisms) { left_out_mechanisms = mechanisms; }
inline bool is_left_out(Mechanism mechanism) {
  return (left_out_mechanisms.load(std::memory_order_relaxed) >> static_cast<uint32_t>(mechanism) & 1U) != 0;
}

}  // namespace patrickstar
