// Mechanisms that benchmark/ablation.py can switch off to measure their effect. Results have the same bits without
// them.
#pragma once

#include <atomic>
#include <cstdint>

namespace patrickstar {

enum class Mechanism : uint8_t {
  kWholeUpdatesAhead,  // speculative updates of all states (Ahead::kEverything)
  kTwoPhaseUpdates,    // two-phase updates and Ahead::kParam
  kScaleIndependentValues,
  kDeferredUpdates,
  kOrderOfNeed,
  kRestingTiersInTurn,
  kRoundTrips,
  kRareSizes,
  kExactDeviceBuffers,
};

// One bit per mechanism, for the process. Read when a step is planned and when an update runs.
inline std::atomic<uint32_t> left_out_mechanisms{0};

inline void set_left_out(uint32_t mechanisms) { left_out_mechanisms = mechanisms; }
inline bool is_left_out(Mechanism mechanism) {
  return (left_out_mechanisms.load(std::memory_order_relaxed) >> static_cast<uint32_t>(mechanism) & 1U) != 0;
}

}  // namespace patrickstar
