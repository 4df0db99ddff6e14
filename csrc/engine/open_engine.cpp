#include "engine/open_engine.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "common/check.h"
#include "common/sizes.h"
#include "plan/chunk_bytes.h"
#include "plan/placement.h"

namespace patrickstar {

namespace {

UpdateStart update_start(const EngineOptions& options, const Layout& layout) {
  const auto& chunks = layout.chunks();
  const bool any_fixed = std::any_of(chunks.begin(), chunks.end(), [](const ChunkSpec& chunk) {
    return chunk.keeps_param() && !chunk.puts_values_in_place();
  });
  return possible_start(options.update_start, options.residency.backwards,
                        any_fixed ? Rollback::kImpossible : Rollback::kPossible);
}

ResidencyOptions residency_options(const EngineOptions& options, const Layout& layout) {
  ResidencyOptions residency = options.residency;
  residency.keeps_gradients = options.update_start != UpdateStart::kCommitted;
  residency.updates_take_memory = update_start(options, layout) == UpdateStart::kSpeculative;
  return residency;
}

// Runs every step, also after one that failed.
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

OpenEngine::OpenEngine(std::shared_ptr<SharedDevice> shared_device, Layout layout, std::vector<std::string> param_names,
                       const std::vector<std::vector<ParamId>>& module_params, const EngineOptions& options,
                       std::shared_ptr<Collectives> ranks, std::shared_ptr<KeptRegions> kept_regions)
    : options(options),
      device(std::move(shared_device)),
      collectives(std::move(ranks)),
      memory(*device, std::move(layout), std::move(param_names), this->options.compute_format,
             this->options.param_shapes),
      traces(memory.tracer()),
      host_updates(device->backend(), device->host_compute(), memory.tracer(), device->host_priority()),
      disk_updates(device->backend(), device->host_compute(), memory.tracer(), device->host_priority(),
                   Track::kDiskAdam),
      disk(memory, options.disk),
      update_states(memory.layout().num_chunks()),
      speculation(memory.layout().num_chunks(), update_states, memory.arena(), host_updates, device->backend(),
                  update_start(options, memory.layout()), reserved_gradient_bytes(memory.layout())),
      pager(memory, disk, speculation, recorder, *collectives, step),
      offload_store(pager, speculation, recorder),
      host_loans(pager, speculation, offload_store),
      gradients(memory.store()),
      matrices(memory, this->options.matrix_rule, this->options.param_shapes,
               options.disk.limit_bytes > 0 ? Tier::kDisk : Tier::kHost),
      updates(pager, gradients, matrices, host_updates, disk_updates, speculation, update_states),
      flow(pager, gradients, updates, recorder, *collectives, step),
      turns(pager, updates, flow, *collectives, paths),
      tracker(pager, flow, turns, step),
      values(pager, *collectives),
      ranges(pager, values),
      rows(pager),
      residency(pager, residency_options(options, memory.layout())),
      planner(pager, recorder, *collectives, residency, updates, flow, traces, paths),
      unfreezing(pager, values, residency, matrices, flow, updates, planner, module_params) {
  collectives->check_layout(this->layout());
  PS_CHECK(!any_gradient_passes(this->layout()) || options.update_start == UpdateStart::kCommitted, ArgumentError,
           "parameters are part of their optimizer states (masters are split, or there are none) and gradients have no "
           "place to wait in, but updates are not committed in backward; give UpdateStart.COMMITTED, or "
           "GradientPlace.OWN");
  const int64_t limit = options.device.device_limit_bytes;
  const int64_t working_set = working_set_bytes(this->layout(), module_params);
  PS_CHECK(working_set <= limit, MemoryBudgetError, "device_memory is ", show_exactly(limit),
           ", but the largest module's chunks and their gradients alone take ", show_exactly(working_set),
           "; raise device_memory to at least ", show_enough(working_set),
           " (activations come on top), or lower default_chunk_size (", this->layout().chunk_numel(), " elements)");
  // A warm-up may exceed the limit, to measure by how much; nothing is updated then.
  backend().set_limit_policy(LimitPolicy::kMeasure);
  memory.arena().reuse_regions(std::move(kept_regions));
  residency.place_initially(working_set);
}

void OpenEngine::shut_down() {
  EveryStep steps;
  steps.then([this] { tracker.abandon_all(); })
      .then([this] { updates.drop_step(); })
      .then([this] { offload_store.drop_all(); })
      .then([this] { speculation.release_memory(); })
      .then([this] { updates.release_device_memory(); })
      .then([this] { disk.close(); });
  for (int index = 0; index < memory.store().num_arrays(); ++index) {
    const ArrayId id = ArrayId::from_index(index);
    steps.then([&] { memory.leave_device(id); }).then([&] { memory.drop_host_buffer(id); });
  }
  steps.then([this] { memory.device_buffers().trim(INT64_MAX); })
      .then([this] { memory.arena().release_reserved(); })
      .then([this] { memory.arena().trim(); })
      .rethrow();
}

}  // namespace patrickstar
