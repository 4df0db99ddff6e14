// The squares of all gradients: one statistic for clipping and for overflow.
//
// A chunk's gradients are summed up where they are, in blocks of optim::kSquaresBlock elements ([Note: one order of
// summation], optim/kernels.h); the blocks' sums, here called partials, are added up at the end where they are, by
// parameter ([Note: a sum that knows no order], optim/wide_sum.h), so that two numbers for each come down. The result
// does not depend on the layout or on the device. With several ranks each has the partials of its shards.
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
  // In device_partials_.
  struct DeviceArrays {
    double* partials;
    optim::PartialsRange* ranges;
    optim::WideSum* sums;
  };

  std::vector<Part> parts(const std::vector<ParamId>& params, const void* data, DType dtype, double* partials) const;
  DeviceArrays device_arrays() const;
  std::vector<optim::WideSum> sums_on_device();
  double sum_over_ranks(const optim::WideSum& mine);
  double* partials(Tier tier);
  void lay_out();

  Pager& pager_;
  ChunkMemory& memory_;
  Collectives& collectives_;
  std::vector<Where> where_;                  // the partials are, by chunk
  std::vector<optim::PartialsRange> ranges_;  // of a parameter's, this rank's among them
  int64_t num_partials_ = 0;
  std::vector<double> partials_;  // on the host, from the first use on
  Slot device_partials_;  // the same on the device, then ranges_, then their sums; empty on the simulated device
};

}  // namespace patrickstar
