// Where the leaf kernels run: on the host's thread pool, or on the device's compute queue.
//
// The same bits come out of both (kernels.h). Host calls return when the work is done, device calls when it is
// enqueued. On the simulated device the two are the same object.
#pragma once

#include <memory>
#include <variant>
#include <vector>

#include "common/thread_pool.h"
#include "optim/kernels.h"
#include "optim/matrix_rule.h"
#include "optim/open_store.h"
#include "optim/wide_sum.h"

namespace patrickstar::optim {

// Of one step, by the rule that makes it.
using StepScalars = std::variant<AdamScalars, MomentumScalars, MatrixScalars>;

struct UpdateJob {
  AdamRange range;
  StepScalars scalars;
  // [Note: settled values]
  float most_grad_scale = 0;
  float least_grad_scale = 0;  // [Note: values in place]: of what put them there
  OpenValues* open = nullptr;  // of each piece
  OpenStore* store = nullptr;  // which they are kept in
};

// The elements of a range from `begin` to `end`; the former a multiple of kStateBlock where states are of 8 bits.
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
  // As CpuKernels' of the same names; `scales` is null but for 8 bits.
  virtual void expand_state(StateType type, const void* data, const float* scales, float* out, int64_t numel) = 0;
  virtual void compress_state(const float* in, StateType type, void* out, float* scales, int64_t numel,
                              const RandomKey& key) = 0;
};

// Kernels that host memory alone needs. Passes other than update() take no whole matrices.
class HostCompute : public Compute {
 public:
  // The new parameters of `jobs` and nothing else, as update() would write them.
  virtual void update_param(const std::vector<UpdateJob>& jobs) = 0;
  // [Note: settled values]: of those that are rounded alike for all scales up to `most_grad_scale`, and of the others,
  // which are in `store`.
  virtual void update_param_between(const std::vector<UpdateJob>& jobs) = 0;
  virtual void update_param_open(const std::vector<UpdateJob>& jobs) = 0;
  // [Note: values in place]: for scales up to `most_grad_scale`; then what was left open; then states. Instead of these
  // the former parameters again. All of Adam and of split masters. put_states() throws StateError where the parameters
  // in place are not those that the states lead to.
  virtual void put_values(const std::vector<UpdateJob>& jobs) = 0;
  virtual void put_open_values(const std::vector<UpdateJob>& jobs) = 0;
  virtual void put_states(const std::vector<UpdateJob>& jobs) = 0;
  virtual void take_values_back(const std::vector<UpdateJob>& jobs) = 0;
  // [Note: split masters]; `variance` is null where that is of fewer bytes.
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
