// Parameters that running operations hold (plan/use_holds.h), in the engine: brings them in, records each moment, and
// retires gradients whose last use in backward is over.
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

// Of a forward.
enum class Attempt : uint8_t {
  kFirst,  // one that runs out of device memory is made again, with an emptier device
  kAgain,  // so is this one
  kLast,
  kOnly,  // the first one, which is not made again: other ranks wait for this one in the middle of it
};

class AccessTracker final : public UseHolds {
 public:
  AccessTracker(Pager& pager, GradientFlow& gradients, RankTurns& turns, const Step& step);

 protected:
  void acquire(const std::vector<ParamId>& params) override;
  void release(const std::vector<ParamId>& params, Phase phase) override;
  void retire(const std::vector<ParamId>& params) override;
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
