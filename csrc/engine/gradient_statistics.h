// The squares of all gradients: one statistic for clipping and for overflow.
//
// A chunk's gradients are summed up where they are, in blocks of optim::kSquaresBlock elements ([Note: one order of
// summation], optim/kernels.h); the blocks' sums, here called partials, are added up at the end, in parameter order. So
// the result does not depend on the layout or on the device. With several ranks each has the partials of its shards.
//
//   statistics.compute({chunk, kGrad}, params);   // a chunk's gradients are complete
//   statistics.forget(chunk);                     // they change
//   double squares = statistics.sum(params);      // of all parameters that have a gradient; waits for the device
//
// Owned by GradientFlow, guarded by the engine's lock.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/pager.h"

namespace patrickstar {

class GradientStatistics {
 public:
  GradientStatistics(Pager& pager, Collectives& collectives);

  // The layout has more trainable parameters than before. Forgets everything; waits for the device.
  void cover_trainable();

  bool has(ChunkId chunk) const { return where_[static_cast<size_t>(chunk)] != Where::kNowhere; }
  void forget(ChunkId chunk) { where_[static_cast<size_t>(chunk)] = Where::kNowhere; }

  // Of the gradients in `source`, on its tier. `params` are those of its chunk that have one.
  void compute(ArrayId source, const std::vector<ParamId>& params);
  // On the scatter's queue, of the shard of gradients in `data`. Which parameters have one on any rank is not known
  // yet, so it is done for all.
  void enqueue_scattered(ChunkId chunk, const void* data);
  // Memory for partials on the device belongs to the compute queue: other queues must wait for it after this.
  void prepare_device();

  // Inf or NaN when any gradient is. `params` in ascending order. With several ranks all must be here.
  double sum(const std::vector<ParamId>& params);

 private:
  enum class Where : uint8_t { kNowhere, kDevice, kHost };
  struct Part {
    const void* data;
    int64_t numel;
    double* partials;
  };
  struct Partials {
    const double* begin;
    const double* end;
  };

  std::vector<Part> parts(const std::vector<ParamId>& params, const void* data, DType dtype, double* partials) const;
  Partials partials_of(ParamId param, const std::vector<double>& from_device) const;
  double sum_in_order(const std::vector<ParamId>& params, const std::vector<double>& from_device) const;
  double sum_over_ranks(const std::vector<ParamId>& params, const std::vector<double>& from_device);
  double* device_partials();
  void lay_out();

  Pager& pager_;
  ChunkMemory& memory_;
  Collectives& collectives_;
  std::vector<Where> where_;      // the partials are, by chunk
  std::vector<int64_t> offsets_;  // of a parameter's partials
  std::vector<double> partials_;  // on the host
  Slot device_partials_;          // the same on the device; empty on the simulated device
};

}  // namespace patrickstar
