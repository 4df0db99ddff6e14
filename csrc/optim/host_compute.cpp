#include <algorithm>
#include <atomic>
#include <iterator>
#include <memory>
#include <new>
#include <optional>
#include <variant>

#include "common/check.h"
#include "optim/compute.h"

namespace patrickstar::optim {

namespace {

constexpr int64_t kGrain = 16 * kSquaresBlock;  // elements: 128 KiB of 16-bit data; whole blocks of statistics
static_assert(kGrain % kScaleDependentPiece == 0 && kScaleDependentPiece % kStateBlock == 0);

void* at(void* state, StateType type, int64_t index) {
  return state == nullptr ? nullptr : static_cast<char*>(state) + state_offset(type, index);
}
const void* at(const void* state, StateType type, int64_t index) {
  return static_cast<const char*>(state) + state_offset(type, index);
}

float* scales_at(float* scales, int64_t index) { return scales == nullptr ? nullptr : scales + index / kStateBlock; }

// One thread's scale-dependent values, for one piece at a time.
class OpenScratch {
 public:
  // None if the memory cannot be allocated.
  std::optional<ScaleDependentValues> values() {
    if (memory_ == nullptr)
      memory_.reset(new (std::nothrow) char[static_cast<size_t>(kCapacity * ScaleDependentValues::kBytes)]);
    if (memory_ == nullptr) return std::nullopt;
    return ScaleDependentValues::in(memory_.get(), kCapacity);
  }

 private:
  static constexpr int64_t kCapacity = kScaleDependentPiece / 16;
  std::unique_ptr<char[]> memory_;
};

class PoolCompute final : public HostCompute {
 public:
  explicit PoolCompute(ThreadPool& pool) : pool_(pool), kernels_(cpu_kernels()) {}

  void update(const std::vector<UpdateJob>& jobs) override {
    if (std::any_of(jobs.begin(), jobs.end(), is_matrix)) return update_matrices(jobs);
    run(jobs, kStateBlock, [this](const AdamRange& range, const UpdateJob& job, int64_t) {
      with_rule(kernels_, job.scalars, [&](const auto& kernels, const auto& scalars) { kernels.step(range, scalars); });
    });
  }
  void update_param(const std::vector<UpdateJob>& jobs) override {
    run(jobs, kStateBlock, [this](const AdamRange& range, const UpdateJob& job, int64_t) {
      with_rule(kernels_, job.scalars,
                [&](const auto& kernels, const auto& scalars) { kernels.param(range, scalars); });
    });
  }
  void update_param_between(const std::vector<UpdateJob>& jobs) override {
    begin_scale_dependent(jobs);
    run(jobs, kScaleDependentPiece, [this](const AdamRange& range, const UpdateJob& job, int64_t first) {
      static thread_local OpenScratch scratch;
      ScaleDependentValues* kept = job.dependent + first / kScaleDependentPiece;
      for_pieces(range, [&](const AdamRange& piece) {
        std::optional<ScaleDependentValues> dependent = scratch.values();
        if (dependent) {
          with_rule(kernels_, job.scalars, [&](const auto& kernels, const auto& scalars) {
            kernels.param_between(piece, scalars, job.most_grad_scale, &*dependent);
          });
        }
        *kept++ = dependent ? job.store->keep(*dependent) : ScaleDependentValues{ScaleDependentValues::kAll};
      });
    });
  }
  void update_param_scale_dependent(const std::vector<UpdateJob>& jobs) override {
    run(jobs, kScaleDependentPiece, [this](const AdamRange& range, const UpdateJob& job, int64_t first) {
      const ScaleDependentValues* kept = job.dependent + first / kScaleDependentPiece;
      for_pieces(range, [&](const AdamRange& piece) {
        with_rule(kernels_, job.scalars, [&](const auto& kernels, const auto& scalars) {
          kernels.param_scale_dependent(piece, scalars, *kept);
        });
        ++kept;
      });
    });
  }
  void put_values(const std::vector<UpdateJob>& jobs) override {
    begin_scale_dependent(jobs);
    for_pieces_of(jobs, [this](const AdamRange& piece, const UpdateJob& job, ScaleDependentValues& kept) {
      static thread_local OpenScratch scratch;
      const auto& scalars = std::get<AdamScalars>(job.scalars);
      std::optional<ScaleDependentValues> dependent = scratch.values();
      kept = {ScaleDependentValues::kAll};
      if (!dependent) return;
      kernels_.adam_put_values(piece, scalars, job.most_grad_scale, &*dependent);
      kept = job.store->keep(*dependent);
      if (kept.count != ScaleDependentValues::kAll) {
        job.store->note_in_place(piece.numel - kept.count);
      } else if (dependent->count != ScaleDependentValues::kAll) {  // no room in the store
        kernels_.adam_take_values_back(piece, scalars, *dependent);
      }
    });
  }
  void put_scale_dependent_values(const std::vector<UpdateJob>& jobs) override {
    for_pieces_of(jobs, [this](const AdamRange& piece, const UpdateJob& job, const ScaleDependentValues& kept) {
      kernels_.adam_put_scale_dependent_values(piece, std::get<AdamScalars>(job.scalars), kept);
    });
  }
  void put_states(const std::vector<UpdateJob>& jobs) override {
    std::atomic<int64_t> wrong{0};
    for_pieces_of(jobs, [&](const AdamRange& piece, const UpdateJob& job, const ScaleDependentValues& kept) {
      wrong += kernels_.adam_put_states(piece, std::get<AdamScalars>(job.scalars), job.least_grad_scale, kept);
    });
    PS_CHECK(wrong == 0, StateError, wrong.load(),
             " parameters that were updated in backward are not those that their optimizer states lead to: host memory "
             "was written, or fails; go on from the last checkpoint");
  }
  void take_values_back(const std::vector<UpdateJob>& jobs) override {
    for_pieces_of(jobs, [this](const AdamRange& piece, const UpdateJob& job, const ScaleDependentValues& kept) {
      kernels_.adam_take_values_back(piece, std::get<AdamScalars>(job.scalars), kept);
    });
  }
  void split_master(const float* master, uint16_t* param, uint16_t* lower, float* variance, int64_t numel) override {
    split(numel, [&](int64_t i, int64_t size) {
      kernels_.split_master(master + i, param + i, lower + i, variance == nullptr ? nullptr : variance + i, size);
    });
  }
  void join_master(const uint16_t* param, const uint16_t* lower, const float* variance, float* master,
                   int64_t numel) override {
    split(numel, [&](int64_t i, int64_t size) {
      kernels_.join_master(param + i, lower + i, variance == nullptr ? nullptr : variance + i, master + i, size);
    });
  }
  void cast_from_float(const float* in, void* out, DType dtype, int64_t numel) override {
    split(numel, [&](int64_t begin, int64_t size) {
      kernels_.cast_from_float(in + begin, element_at(out, begin, dtype), dtype, size);
    });
  }
  void cast_to_float(const void* in, DType dtype, float* out, int64_t numel) override {
    split(numel, [&](int64_t begin, int64_t size) {
      kernels_.cast_to_float(element_at(in, begin, dtype), dtype, out + begin, size);
    });
  }
  void scale(float* values, float factor, int64_t numel) override {
    split(numel, [&](int64_t begin, int64_t size) {
      for (float* value = values + begin; value != values + begin + size; ++value) *value *= factor;
    });
  }
  void add(void* sum, const void* x, DType dtype, int64_t numel) override {
    split(numel, [&](int64_t begin, int64_t size) {
      kernels_.add(element_at(sum, begin, dtype), element_at(x, begin, dtype), dtype, size);
    });
  }
  void add_to_float(float* sum, const void* x, DType dtype, int64_t numel) override {
    split(numel, [&](int64_t begin, int64_t size) {
      kernels_.add_to_float(sum + begin, element_at(x, begin, dtype), dtype, size);
    });
  }
  void sum_squares(const void* x, DType dtype, int64_t numel, double* partials) override {
    split(numel, [&](int64_t begin, int64_t size) {
      kernels_.sum_squares(element_at(x, begin, dtype), dtype, size, partials + begin / kSquaresBlock);
    });
  }
  void add_up(const double* partials, const PartialsRange* ranges, int64_t num_ranges, WideSum* sums) override {
    for (int64_t i = 0; i < num_ranges; ++i) sums[i] = optim::add_up(partials, ranges[i]);
  }
  void expand_state(StateType type, const void* data, const float* scales, float* out, int64_t numel) override {
    split(numel, [&](int64_t begin, int64_t size) {
      kernels_.expand_state(type, at(data, type, begin), scales + (is_8_bit(type) ? begin / kStateBlock : 0),
                            out + begin, size);
    });
  }
  void compress_state(const float* in, StateType type, void* out, float* scales, int64_t numel,
                      const RandomKey& key) override {
    split(numel, [&](int64_t begin, int64_t size) {
      kernels_.compress_state(in + begin, type, at(out, type, begin), scales_at(scales, begin), size,
                              {key.a, key.b, key.first + begin});
    });
  }

 private:
  static bool is_matrix(const UpdateJob& job) { return std::holds_alternative<MatrixScalars>(job.scalars); }
  // For jobs of which some are matrices.
  void update_matrices(const std::vector<UpdateJob>& jobs) {
    std::vector<UpdateJob> others;
    std::remove_copy_if(jobs.begin(), jobs.end(), std::back_inserter(others), is_matrix);
    update(others);
    for (const UpdateJob& job : jobs) {
      if (is_matrix(job)) update_matrix(*this, job.range, std::get<MatrixScalars>(job.scalars));
    }
  }

  // Calls kernel(part, its job, first element), where the first element is a multiple of `unit`. Jobs are concatenated
  // and split evenly, so that many small jobs still keep all threads busy.
  template <typename Kernel>
  void run(const std::vector<UpdateJob>& jobs, int64_t unit, const Kernel& kernel) {
    const auto length = [unit](const UpdateJob& job) { return (job.range.numel + unit - 1) / unit * unit; };
    int64_t total = 0;
    for (const UpdateJob& job : jobs) total += length(job);
    pool_.parallel_for(total, kGrain, [&](int64_t begin, int64_t end) {
      int64_t start = 0;
      for (auto job = jobs.begin(); job != jobs.end() && start < end; start += length(*job++)) {
        const int64_t from = std::max(begin - start, int64_t{0});
        const int64_t to = std::min(end - start, job->range.numel);
        if (from < to) kernel(subrange(job->range, from, to), *job, from);
      }
    });
  }
  // Sets the store's allowance for these jobs of one chunk.
  static void begin_scale_dependent(const std::vector<UpdateJob>& jobs) {
    int64_t numel = 0;
    for (const UpdateJob& job : jobs) numel += job.range.numel;
    if (!jobs.empty()) jobs.front().store->begin_chunk(numel);
  }
  // Calls function(piece, its job, its scale-dependent values).
  template <typename Function>
  void for_pieces_of(const std::vector<UpdateJob>& jobs, const Function& function) {
    run(jobs, kScaleDependentPiece, [&](const AdamRange& range, const UpdateJob& job, int64_t first) {
      ScaleDependentValues* kept = job.dependent + first / kScaleDependentPiece;
      for_pieces(range, [&](const AdamRange& piece) { function(piece, job, *kept++); });
    });
  }
  template <typename Function>
  static void for_pieces(const AdamRange& range, const Function& function) {
    for (int64_t begin = 0; begin < range.numel; begin += kScaleDependentPiece) {
      function(subrange(range, begin, std::min(begin + kScaleDependentPiece, range.numel)));
    }
  }
  template <typename Function>
  void split(int64_t numel, const Function& function) {
    pool_.parallel_for(numel, kGrain, [&](int64_t begin, int64_t end) { function(begin, end - begin); });
  }

  ThreadPool& pool_;
  const CpuKernels& kernels_;
};

}  // namespace

AdamRange subrange(const AdamRange& range, int64_t begin, int64_t end) {
  AdamRange part = range;
  part.master = at(range.master, range.master_type, begin);
  part.momentum = at(range.momentum, range.momentum_type, begin);
  part.variance = at(range.variance, range.variance_type, begin);
  part.grad = element_at(range.grad, begin, range.grad_dtype);
  part.param = range.param == nullptr ? nullptr : element_at(range.param, begin, range.param_dtype);
  part.numel = end - begin;
  part.new_master = range.new_master == nullptr ? nullptr : range.new_master + begin;
  part.new_momentum = at(range.new_momentum, range.momentum_type, begin);
  part.new_variance = at(range.new_variance, range.variance_type, begin);
  part.momentum_scales = scales_at(range.momentum_scales, begin);
  part.variance_scales = scales_at(range.variance_scales, begin);
  part.new_momentum_scales = scales_at(range.new_momentum_scales, begin);
  part.new_variance_scales = scales_at(range.new_variance_scales, begin);
  part.key.first += begin;
  return part;
}

std::unique_ptr<HostCompute> make_host_compute(ThreadPool& pool) { return std::make_unique<PoolCompute>(pool); }

}  // namespace patrickstar::optim
