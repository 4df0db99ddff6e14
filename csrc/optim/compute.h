// Runs the optimizer kernels on the host's thread pool or on the device's compute queue. Both give the same bits
// (kernels.h). Host calls return when the work is done, device calls when it is enqueued. On the simulated device one
// object serves both.
#pragma once

#include <memory>
#include <variant>
#include <vector>

#include "common/thread_pool.h"
#include "optim/kernels.h"
#include "optim/matrix_rule.h"
#include "optim/scale_dependent_store.h"
#include "optim/wide_sum.h"

namespace patrickstar::optim {

// Scalars of one step, by update rule.
using StepScalars = std::variant<AdamScalars, MomentumScalars, MatrixScalars>;

struct UpdateJob {
  AdamRange range;
  StepScalars scalars;
  // upper bound of grad_scale: [Note: scale-independent values]
  float most_grad_scale = 0;
  float least_grad_scale = 0;                 // lower bound with which [Note: values in place] were computed
  ScaleDependentValues* dependent = nullptr;  // one entry per piece of kScaleDependentPiece elements
  ScaleDependentStore* store = nullptr;       // memory of the scale-dependent values
};

// Calls function(passes of the rule, scalars) for scalars of a variant such as StepScalars; not for a matrix rule.
template <typename Scalars, typename Function>
void with_rule(const CpuKernels& kernels, const Scalars& scalars, const Function& function) {
  if (const auto* adam = std::get_if<AdamScalars>(&scalars)) return function(kernels.adam, *adam);
  function(kernels.momentum, std::get<MomentumScalars>(scalars));
}

// Elements `begin` to `end` of a range. With 8-bit states, `begin` must be a multiple of kStateBlock.
AdamRange subrange(const AdamRange& range, int64_t begin, int64_t end);

class Compute {
 public:
  virtual ~Compute() = default;
  virtual void update(const std::vector<UpdateJob>& jobs) = 0;
  virtual void cast_from_float(const float* in, void* out, DType out_dtype, int64_t numel) = 0;
  virtual void cast_to_float(const void* in, DType in_dtype, float* out, int64_t numel) = 0;
  // values[i] *= factor
  virtual void scale(float* values, float factor, int64_t numel) = 0;
  virtual void add(void* sum, const void* x, DType dtype, int64_t numel) = 0;
  virtual void add_to_float(float* sum, const void* x, DType x_dtype, int64_t numel) = 0;
  virtual void sum_squares(const void* x, DType dtype, int64_t numel, double* partials) = 0;
  // sums[i] = add_up(partials, ranges[i])
  virtual void add_up(const double* partials, const PartialsRange* ranges, int64_t num_ranges, WideSum* sums) = 0;
  // See the CpuKernels of these names; `scales` is null except for 8-bit states.
  virtual void expand_state(StateType type, const void* data, const float* scales, float* out, int64_t numel) = 0;
  virtual void compress_state(const float* in, StateType type, void* out, float* scales, int64_t numel,
                              const RandomKey& key) = 0;
};

// Kernels for host memory only. Passes other than update() do not support whole-matrix rules.
class HostCompute : public Compute {
 public:
  // Computes only the new parameters, with the bits of update().
  virtual void update_param(const std::vector<UpdateJob>& jobs) = 0;
  // [Note: scale-independent values]: the parameters that are equal for all scales up to `most_grad_scale`, then the
  // scale-dependent ones, which `store` keeps.
  virtual void update_param_between(const std::vector<UpdateJob>& jobs) = 0;
  virtual void update_param_scale_dependent(const std::vector<UpdateJob>& jobs) = 0;
  // [Note: values in place], for Adam and split masters only, in this order: scale-independent parameters,
  // scale-dependent ones, states. take_values_back() restores the old parameters instead of the last two. put_states()
  // throws StateError if its parameters differ from those in place.
  virtual void put_values(const std::vector<UpdateJob>& jobs) = 0;
  virtual void put_scale_dependent_values(const std::vector<UpdateJob>& jobs) = 0;
  virtual void put_states(const std::vector<UpdateJob>& jobs) = 0;
  virtual void take_values_back(const std::vector<UpdateJob>& jobs) = 0;
  // [Note: split masters]; `variance` is null if it is not float32.
  virtual void split_master(const float* master, uint16_t* param, uint16_t* lower, float* variance, int64_t numel) = 0;
  virtual void join_master(const uint16_t* param, const uint16_t* lower, const float* variance, float* master,
                           int64_t numel) = 0;
};

// `pool` must outlive the result.
std::unique_ptr<HostCompute> make_host_compute(ThreadPool& pool);
#ifdef PATRICKSTAR_WITH_CUDA
// Runs on PyTorch's current stream of `device`.
std::unique_ptr<Compute> make_cuda_compute(int device);
#endif

}  // namespace patrickstar::optim
