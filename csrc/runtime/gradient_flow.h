// Gradients on their way from autograd to the optimizer.
//
// Within one backward a parameter's gradient is folded into its chunk's gradient slot (kGrad, compute dtype). When a
// chunk has all the gradients it had in the backward before (in the first one: one for each trainable parameter), and
// its parameters' values are dead, it retires: the parameters are dropped, the statistics are enqueued and, if the
// optimizer states are on the host, the gradient goes down in their place.
//
// [Note: accumulation] A second backward before the step first moves what is there into a float32 sum (kGradSum), on
// whichever tier the optimizer states are, and keeps the parameters' values from then on. So the sum is
// ((g1 + g2) + g3) in float32 for every placement.
//
// With several ranks a complete chunk's gradients become the ranks' mean, of which this rank keeps its shard (kGradShard): a
// scatter. What is said above of retiring and accumulating holds for the shard then. A parameter that has a gradient on
// any rank has one on all; where it has none, zeros count.
//
// A parameter without a gradient in a step is "unused": has_gradient() is false and the optimizer leaves it alone.
// Guarded by the runtime's lock.
#pragma once

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "runtime/access_tracker.h"
#include "runtime/gradient_statistics.h"
#include "runtime/pager.h"

namespace patrickstar {

class GradientFlow {
 public:
  GradientFlow(Core core, Pager& pager, AccessTracker& tracker);
  ~GradientFlow();

  void begin_backward();
  // `data` is a device pointer to the parameter's gradient in the chunk's dtype, in the memory order of the parameter.
  // It may be freed after the call (in the order of the compute queue).
  void fold(ParamId param, const void* data);
  void end_backward();
  // Forgets what the running micro-batch has contributed (an exception left the backward).
  void abort_backward();
  // Forgets all gradients (zero_grad, or after the step).
  void clear();
  void clear_param(ParamId param);
  // Somebody else changes the chunk's complete gradient.
  void note_rewritten(ChunkId chunk);

  // The layout has more trainable chunks than before.
  void cover_trainable() { statistics_.cover_trainable(); }

  // Told when a chunk's gradient is complete and where its states are, or on its way there, and before such a gradient
  // changes or goes.
  void set_retired_listener(std::function<void(ChunkId)> listener) { retired_listener_ = std::move(listener); }
  void set_change_listener(std::function<void(ChunkId)> listener) { change_listener_ = std::move(listener); }

  // Called by the tracker when a use in backward was released.
  void on_backward_release(ChunkId chunk);

  // Sum of the squares of all gradients, in parameter order; inf or NaN when any gradient is. Completes all statistics.
  // Waits for the device.
  double sum_of_squares();

  bool has_gradient(ParamId param) const {
    return has_grad_[static_cast<size_t>(param)] || has_sum_[static_cast<size_t>(param)];
  }
  bool has_gradient_in(ChunkId chunk) const;
  // kGradSum when micro-batches were accumulated, else where gradients are kept.
  ArrayKind source(ChunkId chunk) const;
  bool pending() const { return num_backwards_ > 0; }
  // The last complete step had several micro-batches, and the next is expected to.
  bool accumulates() const { return accumulates_; }

 private:
  struct ChunkProgress {
    int folds = 0;           // in this backward
    int expected_folds = 0;  // as in the backward before
    bool complete = false;
  };

  void maybe_retire(ChunkId chunk);
  void retire(ChunkId chunk);
  void scatter(ChunkId chunk);
  void note_needed_to_scatter(ChunkId chunk);
  void fill_missing(ChunkId chunk);
  // After a backward: every rank's gradients become all ranks'.
  void scatter_rest();
  void send_home(ChunkId chunk);
  void discard_gradients(ChunkId chunk);
  void add_to_sums();
  void add_to_sum(ChunkId chunk);
  std::vector<ParamId> params_with_gradient(ChunkId chunk) const;
  void forget(ChunkId chunk);
  void announce_change(ChunkId chunk);
  bool states_on_device(ChunkId chunk) const;
  ChunkProgress& progress(ChunkId chunk) { return progress_[static_cast<size_t>(chunk)]; }

  Core core_;
  Pager& pager_;
  AccessTracker& tracker_;
  std::vector<uint8_t> has_grad_;  // by parameter: a gradient of the running or last micro-batch is in kGrad
  std::vector<uint8_t> in_slot_;   // by parameter: kGrad has a gradient of it
  std::vector<uint8_t> has_sum_;   // by parameter: earlier micro-batches are in kGradSum
  std::vector<ChunkProgress> progress_;
  GradientStatistics statistics_;
  std::function<void(ChunkId)> retired_listener_;
  std::function<void(ChunkId)> change_listener_;
  Event last_scatter_;              // when the gradients of all scatters so far are there
  std::vector<uint8_t> scattered_;  // by chunk, in this backward
  int num_backwards_ = 0;           // since the last clear()
  bool in_backward_ = false;
  bool accumulates_ = false;  // the step before had several micro-batches
};

}  // namespace patrickstar
