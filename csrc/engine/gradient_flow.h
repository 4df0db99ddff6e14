// Gradients on their way from autograd to the optimizer, from the fold of a parameter's to the update of its chunk.
//
// Within one backward a parameter's gradient is folded into its chunk's gradient slot (kGrad, compute dtype). When a
// chunk has all the gradients it had in the backward before (in the first one: one for each trainable parameter), and
// its parameters' values are dead, it retires: the parameters are dropped, the statistics are enqueued and, if the
// optimizer states are on the host, the gradient goes down in their place. Then its update may start
// (engine/updates.h).
//
// A second backward before the step first moves what is there into a float32 sum (kGradSum), on
// whichever tier the optimizer states are, and keeps the parameters' values from then on. So the sum is
// ((g1 + g2) + g3) in float32 for every placement.
//
// A complete chunk's gradients, where ranks share it, become the ranks' mean, of which this rank keeps its shard
// (kGradShard): a scatter. What is said above of retiring and accumulating holds for the shard then. A parameter that
// has a gradient on any rank has one on all; where it has none, zeros count. In a plan, chunks are scattered in the
// plan's order ([Note: ranks in a plan], engine/rank_turns.h), and the recorder notes when each could be, so that the
// next plan has it there.
//
// A parameter without a gradient in a step is "unused", and the optimizer leaves it alone.
// Guarded by the engine's lock.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/gradient_statistics.h"
#include "engine/gradients.h"
#include "engine/pager.h"
#include "engine/updates.h"
#include "plan/ops.h"

namespace patrickstar {

class GradientFlow {
 public:
  GradientFlow(Pager& pager, Gradients& gradients, Updates& updates, Recorder& recorder, Collectives& collectives,
               const Step& step);

  // Where it throws none has begun, and all gradients so far are kept.
  void begin_backward();
  // `data` is a device pointer to the parameter's gradient in the chunk's dtype, in the memory order of the parameter.
  // It may be freed after the call (in the order of the compute queue).
  void fold(ParamId param, const void* data);
  // A use of the chunk in backward was released, which may have been the last that it waited for.
  void retire_if_complete(ChunkId chunk);
  // Autograd is done: what is complete by now retires.
  void complete_backward();
  // With several ranks, when their phases are over: every rank's gradients become all ranks'. False, and nothing is
  // done, where a rank is in the middle of its backward (BackwardEnd::kLeavesPlan). One exchange.
  bool scatter_rest(BackwardEnd mine);
  // With several ranks: the plan's reduce-scatters up to the running moment, with the gradients that are there.
  void scatter_due();
  // True where the last backward gave gradients, on any rank; else it is as if it had not been.
  bool keep_backward();
  // Forgets what the running micro-batch has contributed (an exception left the backward).
  void abort_backward();
  // Forgets all gradients (zero_grad, or after the step).
  void clear();
  void clear_param(ParamId param);
  // Somebody else changes the chunk's complete gradient.
  void note_rewritten(ChunkId chunk);

  // The layout has more trainable chunks than before.
  void cover_trainable() { statistics_.cover_trainable(); }

  // With several ranks: chunks that are complete here, and not yet known to be so on all ranks.
  const std::vector<ChunkId>& complete_here() const { return complete_here_; }
  void forget_complete() { complete_here_.clear(); }
  void forget_complete(ChunkId chunk);
  // This rank's part in the ranks' mean, which all must take in the same order.
  void scatter(ChunkId chunk) { scatter(chunk, Extent::kComplete); }

  // Sum of the squares of all gradients but those of `left_out` (ascending), in parameter order; inf or NaN when any of
  // these is. Completes all statistics. Waits for the device.
  double sum_of_squares(const std::vector<ParamId>& left_out);

  bool pending() const { return num_backwards_ > 0; }
  // The last complete step had several micro-batches, and the next is expected to.
  bool accumulates() const { return accumulates_; }

 private:
  enum class Extent : uint8_t {
    kComplete,
    kPartial,  // of this rank more may come in this backward, so no update begins
  };
  struct ChunkProgress {
    int folds = 0;           // in this backward
    int expected_folds = 0;  // as in the backward before
    bool complete = false;
    bool scattered = false;  // in this backward
    // When it had all its gradients and its values were dead, as known at the end of a backward: the recorder's moment,
    // and the order among chunks; 0: not yet.
    int64_t done_moment = -1;
    int64_t done_order = 0;
  };

  void note_done(ChunkId chunk);
  void record_done();
  void scatter_planned();
  void scatter(ChunkId chunk, Extent extent);
  bool is_complete_here(ChunkId chunk) const;
  void retire(ChunkId chunk);
  void note_needed_to_scatter(ChunkId chunk);
  void fill_missing(ChunkId chunk);
  void enqueue_mean(ChunkId chunk, void* sum, bool again);
  Retirement retirement_of(ChunkId chunk, Extent extent);
  // Carries out the retirement's instructions (plan/ops.h).
  void carry_out(const Retirement& retired);
  void free_value(ChunkId chunk);
  void free_whole(ChunkId chunk);
  void scatter_mean(ChunkId chunk);
  void discard_gradients(ChunkId chunk);
  void forget(ChunkId chunk);
  void add_to_sums();
  void add_to_sum(ChunkId chunk);
  ChunkProgress& progress(ChunkId chunk) { return progress_[static_cast<size_t>(chunk)]; }
  bool is_in_slot(ParamId param) const { return in_slot_[static_cast<size_t>(param)] != 0; }
  ArrayId home_of(ChunkId chunk) const { return store_.layout().grad_home(chunk); }

  Pager& pager_;
  ChunkMemory& memory_;
  ChunkStore& store_;
  Gradients& gradients_;
  Updates& updates_;
  Recorder& recorder_;
  Collectives& collectives_;
  const Step& step_;
  GradientStatistics statistics_;
  std::vector<uint8_t> in_slot_;  // by parameter: kGrad has a gradient of it
  std::vector<ChunkProgress> progress_;
  std::vector<ChunkId> complete_here_;
  bool any_rank_has_own_ = false;  // gradients of parameters that it shares with no other, of the last backward
  int64_t num_done_ = 0;           // in this backward, counted each time
  Event last_scatter_;             // when the gradients of all scatters so far are there
  int num_backwards_ = 0;          // since the last clear()
  bool accumulates_ = false;       // the step before had several micro-batches
};

}  // namespace patrickstar
