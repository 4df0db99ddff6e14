// Parameters that running operations hold (plan/use_holds.h). The tracker brings them to the device, records each
// access, and finalises gradients after the last use of their chunk in backward.
//
// Guarded by the engine's lock.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/gradient_flow.h"
#include "engine/pager.h"
#include "engine/rank_turns.h"
#include "engine/step_state.h"
#include "plan/use_holds.h"

namespace patrickstar {

enum class Attempt : uint8_t {
  kFirst,  // an attempt that runs out of device memory is repeated with an emptier device
  kAgain,  // as kFirst, for a repetition
  kLast,   // the last repetition
  kOnly,   // a first attempt that is never repeated: other ranks wait for it in the middle of the forward
};

class AccessTracker final : public UseHolds {
 public:
  AccessTracker(Pager& pager, GradientFlow& gradients, RankTurns& turns, const Step& step);

 protected:
  void acquire(const std::vector<ParamId>& params) override;
  void release(const std::vector<ParamId>& params, Phase phase) override;
  void finalise(const std::vector<ParamId>& params) override;
  bool is_in_use(ParamId param) const override { return store_.uses(param) > 0; }

 private:
  void bring(const std::vector<ArrayId>& arrays);

  Pager& pager_;
  ChunkStore& store_;
  GradientFlow& gradients_;
  RankTurns& turns_;
  const Step& step_;
};

}  // namespace patrickstar
