// Sum of squares of all gradients, for clipping and for overflow detection.
//
// The tier that has a chunk's gradients makes partial sums over optim::kSquaresBlock elements (optim/kernels.h). It
// adds them per parameter (optim/wide_sum.h), so two numbers per parameter reach the host. The result depends neither
// on the layout nor on the device. Each rank has the partial sums of its shards (Extent::kShard), or of all gradients
// that it made itself (Extent::kWhole; sum() then adds the ranks' own sums).
//
//   statistics.compute({chunk, kGrad}, params);   // a chunk's gradients are complete
//   statistics.forget(chunk);                     // its gradients change
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
  enum class Extent : uint8_t { kShard, kWhole };

  GradientStatistics(Pager& pager, Collectives& collectives, Extent extent);

  // The layout has more trainable parameters than before. Forgets all partial sums; waits for the device.
  void cover_trainable();

  bool has(ChunkId chunk) const { return where_[static_cast<size_t>(chunk)] != Where::kNowhere; }
  void forget(ChunkId chunk) { where_[static_cast<size_t>(chunk)] = Where::kNowhere; }

  // Enqueues the partial sums of the gradients in `source`, on its tier. `params`: its parameters that have a gradient.
  void compute(ArrayId source, const std::vector<ParamId>& params);
  // Enqueues the partial sums of a chunk's gradients in `data` (a shard, or the whole chunk) on the queue of
  // reduce-scatters. Computed for all parameters, since it is not known yet which of them have a gradient on any rank.
  void enqueue_scattered(ChunkId chunk, const void* data);
  // Allocates the partial sums on the device, in the order of the compute queue; other queues must wait for it.
  void prepare_device();

  // Inf or NaN if any gradient is. `params` in ascending order; `more` is added on this rank. All ranks must call it.
  double sum(const std::vector<ParamId>& params, double more = 0.0);

 private:
  enum class Where : uint8_t { kNowhere, kDevice, kHost };
  struct Part {
    const void* data;
    int64_t numel;
    double* partials;
  };
  struct DeviceArrays {
    double* partials;
    optim::PartialsRange* ranges;
    optim::WideSum* sums;
  };

  ParamShard extent_of(ParamId param) const;
  std::vector<Part> parts(const std::vector<ParamId>& params, const void* data, DType dtype, double* partials) const;
  DeviceArrays device_arrays() const;
  std::vector<optim::WideSum> sums_on_device();
  double sum_over_ranks(const optim::WideSum& mine);
  double* partials(Tier tier);
  void lay_out();

  Pager& pager_;
  ChunkMemory& memory_;
  Collectives& collectives_;
  const Extent extent_;
  std::vector<Where> where_;                  // by chunk: tier of its partial sums
  std::vector<optim::PartialsRange> ranges_;  // by parameter: its partial sums of this rank
  int64_t num_partials_ = 0;
  std::vector<double> partials_;  // on the host; allocated at the first use
  DeviceBuffer
      device_partials_;  // partial sums on the device, ranges_, sums per parameter; empty on the simulated device
};

}  // namespace patrickstar
