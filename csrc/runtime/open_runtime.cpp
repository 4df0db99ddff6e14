#include "runtime/open_runtime.h"

#include <exception>
#include <utility>

#include "backend/delaying_backend.h"
#include "common/check.h"
#include "memory/interleave.h"
#include "runtime/host_regions.h"
#include "runtime/placement.h"

namespace patrickstar {

namespace {

// On CUDA PyTorch's allocator needs some room to round and to fragment.
constexpr double kCudaSlackRatio = 0.04;
constexpr double kCudaSlotWaste = 0.125;

std::unique_ptr<Backend> make_backend(const RuntimeOptions& options) {
#ifdef PATRICKSTAR_WITH_CUDA
  if (options.cuda_device >= 0) {
    return make_cuda_backend(options.cuda_device, options.device_limit_bytes, options.limit_rounding_bytes);
  }
#endif
  PS_CHECK(options.cuda_device < 0, ArgumentError,
           "this build of PatrickStar has no CUDA part; build it with a CUDA "
           "PyTorch and nvcc (python -m patrickstar.env says what is missing)");
  return make_cpu_backend(options.device_limit_bytes);
}

std::unique_ptr<optim::Compute> make_device_compute(const RuntimeOptions& options) {
#ifdef PATRICKSTAR_WITH_CUDA
  if (options.cuda_device >= 0) return optim::make_cuda_compute(options.cuda_device);
#endif
  (void)options;
  return nullptr;
}

ResidencyOptions residency_options(const RuntimeOptions& options) {
  ResidencyOptions residency = options;
  residency.keeps_gradients = options.speculation != SpeculationMode::kCommit;
  residency.slack_ratio = options.cuda_device >= 0 ? kCudaSlackRatio : 0;
  return residency;
}

// Does one thing after the other, also after one that fails.
class EveryStep {
 public:
  template <typename Step>
  EveryStep& then(const Step& step) {
    try {
      step();
    } catch (...) {
      if (!first_failure_) first_failure_ = std::current_exception();
    }
    return *this;
  }
  void rethrow() const {
    if (first_failure_) std::rethrow_exception(first_failure_);
  }

 private:
  std::exception_ptr first_failure_;
};

}  // namespace

OpenRuntime::OpenRuntime(Layout layout, std::vector<std::string> param_names,
                         const std::vector<std::vector<ParamId>>& module_params, const RuntimeOptions& options,
                         std::shared_ptr<Collectives> collectives, std::recursive_timed_mutex& mutex)
    : options(options),
      mutex(mutex),
      collectives(std::move(collectives)),
      backend(make_delaying_backend(make_backend(options), options.delays)),
      host_threads(choose_host_threads(read_cpu_topology(allowed_cpus()), options.host_threads)),
      pool(host_threads.num_threads, host_threads.worker_cpus),
      host_compute(optim::make_host_compute(pool)),
      cuda_compute(make_device_compute(options)),
      slots(*backend, options.cuda_device >= 0 ? kCudaSlotWaste : 0.0),
      interleaved_nodes(nodes_to_interleave(host_threads.nodes)),
      arena(
          options.host_limit_bytes,
          make_region_hooks(*backend, pool, options.cuda_device >= 0 ? PageLocking::kForTransfers : PageLocking::kNone,
                            interleaved_nodes)),
      store(std::move(layout), std::move(param_names)),
      tracer(*backend, store, slots),
      traces(tracer),
      transfer(*backend, store, tracer),
      pager(core()),
      gather(core(), pager),
      tracker(core(), pager),
      gradients(core(), pager, tracker),
      step(core(), pager, gradients, options.speculation),
      values(core(), pager),
      residency(core(), pager, residency_options(options)),
      planner(core(), pager, residency, step, gradients, traces),
      unfreezing(core(), pager, values, residency, gradients, step, planner, module_params,
                 options.device_limit_bytes) {
  PS_CHECK(store.layout().sharding().num_ranks == this->collectives->num_ranks(), ArgumentError, "the layout is for ",
           store.layout().sharding().num_ranks, " ranks, there are ", this->collectives->num_ranks());
  const int64_t working_set = working_set_bytes(store.layout(), module_params);
  PS_CHECK(working_set <= options.device_limit_bytes, MemoryBudgetError, "device_memory is ",
           options.device_limit_bytes, " bytes, but the largest module's chunks and their gradients alone take ",
           working_set, " bytes; raise device_memory to at least ", working_set,
           " bytes (activations come on top), or lower default_chunk_size (", store.layout().chunk_numel(),
           " elements)");
  pager.set_host_pressure_handler([this] { step.release_host_memory(); });
  // A warm-up may exceed the limit so that it can say by how much; nothing is updated in that case.
  backend->set_limit_policy(LimitPolicy::kMeasure);
  residency.place_initially();
}

void OpenRuntime::shut_down() {
  EveryStep()
      .then([this] { tracker.release_all(); })
      .then([this] { step.forget_committed(); })
      .then([this] { step.release_host_memory(); })
      .then([this] {
        for (int index = 0; index < store.num_arrays(); ++index) pager.discard(ArrayId::from_index(index));
      })
      .then([this] { slots.trim(INT64_MAX); })
      .then([this] { arena.release_reserved(); })
      .then([this] { arena.trim(); })
      .then([this] { backend->shut_down(); })
      .rethrow();
}

Core OpenRuntime::core() {
  return {*backend, store,    slots,         arena,
          transfer, pool,     *host_compute, cuda_compute ? *cuda_compute : *host_compute,
          recorder, counters, tracer,        *collectives,
          mutex};
}

}  // namespace patrickstar
