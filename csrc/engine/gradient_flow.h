// The way of gradients from autograd to the optimizer: accumulation of each parameter's gradient, then the update of
// its chunk.
//
// Within one backward, a parameter's gradient is copied or added into its chunk's gradient buffer (kGrad, compute
// dtype). A chunk's gradient is complete when as many arrived as in the backward before (in the first: one per
// trainable parameter). When the parameters' values are dead as well, the gradient is finalised:
//
// - the values are dropped;
// - the statistics are enqueued;
// - if the optimizer states are on the host, the gradient is downloaded;
// - the update may start (engine/updates.h).
//
// A second backward before the step first moves existing gradients into a float32 sum (kGradSum) on the tier of the
// optimizer states. Parameter values are kept from then on. For every placement the sum is ((g1 + g2) + g3) in float32.
//
// If ranks share the chunk, a reduce-scatter makes the ranks' mean, of which this rank keeps its shard (kGradShard);
// the rules above then hold for the shard. A parameter with a gradient on any rank has one on all; missing ones count
// as zeros. With a plan, reduce-scatters follow the plan's order ([Note: ranks in a plan], engine/rank_turns.h). The
// recorder notes the earliest access for each of them, where the next plan puts it.
//
// The optimizer ignores a parameter without a gradient. Guarded by the engine's lock.
//
// [Note: squares of parts] The gradient noise scale needs the squared norm of a part of the step's gradient. A part is
// one rank's gradient of the first micro-batch. Ranks that share chunks measure it before each reduce-scatter. Without
// other ranks it is measured at the end of the first of several backwards, of which the next step then needs two.
#pragma once

#include <cstdint>
#include <optional>
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

  // If it throws, the backward has not begun and earlier gradients are kept.
  void begin_backward();
  // `data`: device pointer to the parameter's gradient, in the chunk's dtype and the parameter's memory order. It may
  // be freed after the call, in the order of the compute queue.
  void accumulate(ParamId param, const void* data);
  void finalise_if_complete(ChunkId chunk);
  // Autograd is done: finalises the gradients that are complete.
  void complete_backward();
  // With several ranks, after their phases: reduce-scatters the remaining gradients. Returns false, and does nothing,
  // if a rank is in the middle of its backward (BackwardEnd::kLeavesPlan). One exchange.
  bool scatter_rest(BackwardEnd mine);
  // With several ranks: the plan's reduce-scatters up to the running access, with the gradients that exist.
  void scatter_due();
  // True if the last backward gave gradients on any rank; otherwise the backward is not counted.
  bool keep_backward();
  // An exception left the backward: forgets the gradients of the running micro-batch.
  void abort_backward();
  // Forgets all gradients (zero_grad, or after the step).
  void clear();
  void clear_param(ParamId param);
  // The caller is about to change the chunk's complete gradient.
  void note_rewritten(ChunkId chunk);

  // The layout has more trainable chunks than before.
  void cover_trainable() {
    statistics_.cover_trainable();
    if (parts_) parts_->cover_trainable();
  }

  // From the next step on, squares_of_parts() has a value.
  void measure_parts();
  // Sum over ranks of the squared norms of parts ([Note: squares of parts]), without `left_out` (ascending). NaN if
  // this step has none. After sum_of_squares(), before clear(); all ranks must call it.
  double squares_of_parts(const std::vector<ParamId>& left_out);

  // With several ranks: chunks that are complete here and not yet known to be complete everywhere.
  const std::vector<ChunkId>& complete_here() const { return complete_here_; }
  void forget_complete() { complete_here_.clear(); }
  void forget_complete(ChunkId chunk);
  // Reduce-scatters the chunk's gradients; all ranks must call it in the same order.
  void scatter(ChunkId chunk) { scatter(chunk, Extent::kComplete); }

  // Sum of squares of all gradients except those of `left_out` (ascending), in parameter order; inf or NaN if any
  // gradient is. Completes all statistics and waits for the device.
  double sum_of_squares(const std::vector<ParamId>& left_out);

  bool pending() const { return num_backwards_ > 0; }
  // This step has had several backwards, or the last one had and the next is expected to.
  bool accumulates() const { return accumulates_; }

 private:
  enum class PartsState : uint8_t {
    kNone,
    kMeasured,
    kIncomplete,  // a reduce-scatter took place before the chunk's last gradient
  };
  enum class Extent : uint8_t {
    kComplete,
    kPartial,  // more gradients of this rank may follow in this backward, so no update begins
  };
  struct ChunkProgress {
    int accumulations = 0;           // gradients accumulated in this backward
    int expected_accumulations = 0;  // as in the backward before
    bool complete = false;
    bool scattered = false;  // in this backward
    // When the chunk was complete and its values dead, as known at the end of a backward. done_access: the recorder's
    // access. done_order: position among chunks; 0: not yet.
    int64_t done_access = -1;
    int64_t done_order = 0;
  };

  void note_done(ChunkId chunk);
  void record_done();
  void scatter_planned();
  void scatter(ChunkId chunk, Extent extent);
  bool is_complete_here(ChunkId chunk) const;
  void finalise(ChunkId chunk);
  void note_needed_to_scatter(ChunkId chunk);
  void fill_missing(ChunkId chunk);
  void enqueue_mean(ChunkId chunk, void* sum, bool again);
  bool measures_parts() const { return parts_ && num_backwards_ == 1; }
  void forget_parts();
  void note_part(const std::vector<ParamId>& params);
  void measure_own_parts();
  Finalisation finalisation_of(ChunkId chunk, Extent extent);
  void carry_out(const Finalisation& finalised);
  void free_value(ChunkId chunk);
  void free_whole(ChunkId chunk);
  void scatter_mean(ChunkId chunk);
  void discard_gradients(ChunkId chunk);
  void forget(ChunkId chunk);
  void add_to_sums();
  void add_to_sum(ChunkId chunk);
  ChunkProgress& progress(ChunkId chunk) { return progress_[static_cast<size_t>(chunk)]; }
  bool is_in_device_buffer(ParamId param) const { return in_device_buffer_[static_cast<size_t>(param)] != 0; }
  ArrayId resting_tier_of(ChunkId chunk) const { return store_.layout().grad_resting_tier(chunk); }

  Pager& pager_;
  ChunkMemory& memory_;
  ChunkStore& store_;
  Gradients& gradients_;
  Updates& updates_;
  Recorder& recorder_;
  Collectives& collectives_;
  const Step& step_;
  GradientStatistics statistics_;
  std::optional<GradientStatistics> parts_;  // of this rank, in the first micro-batch; only if they are measured
  PartsState parts_state_ = PartsState::kNone;
  std::vector<ParamId> part_params_;       // measured in this step
  std::vector<uint8_t> in_device_buffer_;  // by parameter: kGrad has its gradient
  std::vector<ChunkProgress> progress_;
  std::vector<ChunkId> complete_here_;
  // on any rank, the last backward gave gradients to parameters that no other rank shares
  bool any_rank_has_own_ = false;
  int64_t num_done_ = 0;      // in this backward; counts repetitions
  Event last_scatter_;        // after all reduce-scatters so far
  int num_backwards_ = 0;     // since the last clear()
  bool accumulates_ = false;  // this step has had several backwards, or the last one had
};

}  // namespace patrickstar
