#include "runtime/runtime.h"

#include <algorithm>
#include <utility>

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

ResidencyOptions residency_options(const RuntimeOptions& options, const Layout& layout) {
  ResidencyOptions residency = options;
  residency.staging_bytes = streaming_bytes(options.streaming, layout, options.device_limit_bytes);
  residency.keeps_gradients = options.speculation != SpeculationMode::kCommit;
  residency.slack_ratio = options.cuda_device >= 0 ? kCudaSlackRatio : 0;
  return residency;
}

}  // namespace

Runtime::Runtime(Layout layout, std::vector<std::string> param_names,
                 const std::vector<std::vector<ParamId>>& module_params, const RuntimeOptions& options,
                 std::shared_ptr<Collectives> collectives)
    : options_(options),
      collectives_(std::move(collectives)),
      backend_(make_backend(options)),
      host_threads_(choose_host_threads(read_cpu_topology(allowed_cpus()), options.host_threads)),
      pool_(host_threads_.num_threads, host_threads_.worker_cpus),
      delays_(options.delays),
      host_compute_(optim::make_host_compute(pool_)),
      cuda_compute_(make_device_compute(options)),
      slots_(*backend_, options.cuda_device >= 0 ? kCudaSlotWaste : 0.0),
      interleaved_nodes_(nodes_to_interleave(host_threads_.nodes)),
      arena_(options.host_limit_bytes,
             make_region_hooks(*backend_, pool_,
                               options.cuda_device >= 0 ? PageLocking::kForTransfers : PageLocking::kNone,
                               interleaved_nodes_)),
      store_(std::move(layout), std::move(param_names)),
      tracer_(*backend_, store_, slots_),
      traces_(tracer_),
      transfer_(*backend_, store_, tracer_, delays_),
      pager_(std::make_unique<Pager>(core())),
      gather_(std::make_unique<ChunkGather>(core(), *pager_)),
      tracker_(std::make_unique<AccessTracker>(core(), *pager_)),
      gradients_(std::make_unique<GradientFlow>(core(), *pager_, *tracker_)),
      step_(std::make_unique<OptimizerStep>(core(), *pager_, *gradients_, options.speculation, options.streaming)),
      values_(std::make_unique<ChunkValues>(core(), *pager_)),
      residency_(std::make_unique<Residency>(core(), *pager_, residency_options(options, store_.layout()))),
      planner_(std::make_unique<StepPlanner>(core(), *pager_, *residency_, *step_, *gradients_, traces_)) {
  PS_CHECK(store_.layout().sharding().num_ranks == collectives_->num_ranks(), ArgumentError, "the layout is for ",
           store_.layout().sharding().num_ranks, " ranks, there are ", collectives_->num_ranks());
  const int64_t working_set = working_set_bytes(store_.layout(), module_params);
  PS_CHECK(working_set <= options_.device_limit_bytes, MemoryBudgetError, "device_memory is ",
           options_.device_limit_bytes, " bytes, but the largest module's chunks and their gradients alone take ",
           working_set, " bytes; raise device_memory to at least ", working_set,
           " bytes (activations come on top), or lower default_chunk_size (", store_.layout().chunk_numel(),
           " elements)");
  pager_->set_host_pressure_handler([this] { step_->release_host_memory(); });
  pager_->set_device_pressure_handler([this] { step_->release_device_memory(); });
  // A warm-up may exceed the limit so that it can say by how much; nothing is updated in that case.
  backend_->set_limit_policy(LimitPolicy::kMeasure);
  residency_->place_initially();
}

Runtime::Entry::Entry(Runtime& runtime) : lock_(runtime.mutex_) {
  PS_CHECK(!runtime.closed_, StateError,
           "this engine is closed, but something of it is still used (the backward of an old loss?); "
           "build a new engine to train on");
}

Runtime::~Runtime() {
  if (!closed_) close();
}

void Runtime::close() {
  const Entry entry(*this);
  tracker_->release_all();
  step_->forget_committed();
  step_->release_host_memory();
  step_->release_device_memory();
  for (int index = 0; index < store_.num_arrays(); ++index) pager_->discard(ArrayId::from_index(index));
  closed_ = true;
  slots_.trim(INT64_MAX);
  arena_.release_reserved();
  arena_.trim();
  backend_->shut_down();
}

Core Runtime::core() {
  return {*backend_,     store_,    slots_,         arena_,
          transfer_,     pool_,     *host_compute_, cuda_compute_ ? *cuda_compute_ : *host_compute_,
          recorder_,     counters_, tracer_,        delays_,
          *collectives_, mutex_};
}

void Runtime::bind_storage(ChunkId chunk, c10::StorageImpl* storage) {
  const Entry entry(*this);
  const ArrayId id{chunk, ArrayKind::kParam};
  store_.storage(chunk) =
      ParamStorage(storage, store_.num_bytes(id),
                   store_.describe(id) +
                       ": its memory is not on the device now. PatrickStar brings parameters in when a module or a "
                       "torch function uses them; code that reads a tensor's memory in another way must run inside the "
                       "module that owns it.");
}

void Runtime::seal_storage(ChunkId chunk) {
  const Entry entry(*this);
  store_.storage(chunk).detach();
}

void Runtime::write_values(ParamId param, ArrayKind kind, ParamValues values) {
  const Entry entry(*this);
  tracker_->release_transient();
  step_->cancel(layout().placement(param).chunk);
  values_->write(param, kind, values, residency_->home(layout().placement(param).chunk));
}

void Runtime::read_values(ParamId param, ArrayKind kind, float* values) {
  const Entry entry(*this);
  values_->read(param, kind, values);
}

void Runtime::read_own_values(ParamId param, ArrayKind kind, float* values) {
  const Entry entry(*this);
  values_->read_own(param, kind, values);
}

void Runtime::read_gradient(ParamId param, float* values) {
  const Entry entry(*this);
  const ChunkId chunk = layout().placement(param).chunk;
  step_->check_nothing_committed("a gradient was to be read");
  values_->read_gradient(param, gradients_->source(chunk), values);
}

void Runtime::write_gradient(ParamId param, ParamValues values) {
  const Entry entry(*this);
  const ChunkId chunk = layout().placement(param).chunk;
  step_->check_nothing_committed("a gradient was to be written");
  gradients_->note_rewritten(chunk);
  values_->write_gradient(param, gradients_->source(chunk), values);
}

void Runtime::adopt_timeline(Timeline timeline, std::optional<StepTimes> times) {
  const Entry entry(*this);
  PS_CHECK(!warmed_up_ && recorder_.position() < 0, StateError, "a plan is adopted before the first step only");
  recorder_.set_last(std::move(timeline));
  residency_->place_in_margin(recorder_.last());
  residency_->limit_payloads(recorder_.last());
  planner_->adopt(std::move(times));
}

void Runtime::release_chunk(ChunkId chunk) {
  const Entry entry(*this);
  tracker_->release_all();
  step_->forget_committed();
  step_->cancel(chunk);
  for (int kind = 0; kind < kNumArrayKinds; ++kind) pager_->discard({chunk, static_cast<ArrayKind>(kind)});
  slots_.trim(INT64_MAX);
  arena_.trim();
}

void Runtime::begin_forward(Tracking tracking) {
  const Entry entry(*this);
  tracker_->release_transient();
  tracker_->set_tracking(tracking);
  tracker_->set_phase(Phase::kForward);
  if (tracking == Tracking::kTraining && recorder_.position() < 0) {
    backend_->take_tide_peak();
    pager_->restart_replay();
    arena_.prepare_ahead();  // the moments' memory, beside the first step
    planner_->begin_step();
    tracer_.begin_step();
  }
}

void Runtime::end_forward() {
  const Entry entry(*this);
  tracker_->release_all();
  if (layout().is_sharded() && !pager_->replays()) collectives_->finish_phase();
  tracker_->set_tracking(Tracking::kUntracked);
  if (!warmed_up_ && recorder_.position() < 0) check_least_limit("this forward pass");
}

Tick Runtime::open_scope(const std::vector<ParamId>& params, HoldUntil until) {
  const Entry entry(*this);
  step_->check_not_committed(params);
  return tracker_->open_scope(params, until);
}

void Runtime::close_scope() {
  const Entry entry(*this);
  tracker_->close_scope();
}

Tick Runtime::tick() {
  const Entry entry(*this);
  return tracker_->tick();
}

Tick Runtime::touch(const std::vector<ParamId>& params) {
  const Entry entry(*this);
  step_->check_not_committed(params);
  return tracker_->touch(params);
}

void Runtime::begin_backward(const std::vector<GroupOptions>& expected_groups, double expected_grad_scale) {
  const Entry entry(*this);
  step_->check_nothing_committed("a second backward");
  step_->expect(expected_groups, expected_grad_scale);
  tracker_->release_transient();
  tracker_->set_tracking(Tracking::kTraining);
  tracker_->set_phase(Phase::kBackward);
  gradients_->begin_backward();
}

void Runtime::enter_backward(Tick begin, Tick end, const std::vector<ParamId>& params) {
  const Entry entry(*this);
  step_->check_not_committed(params);
  tracker_->enter_backward(begin, end, params);
}

void Runtime::fold_gradient(ParamId param, const void* data) {
  const Entry entry(*this);
  gradients_->fold(param, data);
}

void Runtime::end_backward() {
  const Entry entry(*this);
  tracker_->release_all();
  gradients_->end_backward();
  tracker_->set_tracking(Tracking::kUntracked);
  if (!warmed_up_) check_least_limit("this step");
}

void Runtime::check_least_limit(const char* when) {
  int64_t least = backend_->least_limit_bytes();
  if (least >= options_.ample_limit_bytes) least += options_.ample_extra_bytes;
  if (layout().is_sharded()) least = collectives_->max_over_ranks(least);
  const int64_t limit = options_.device_limit_bytes;
  if (least <= limit) return;
  gradients_->clear();
  forget_running_step();
  backend_->reset_least_limit();
  PS_CHECK(false, MemoryBudgetError, "device_memory is ", limit, " bytes, but ", when, " needs ", least,
           " bytes at its peak even with every idle chunk evicted; raise device_memory to at least ", least,
           " bytes, or lower the batch size or default_chunk_size. Nothing was updated");
}

void Runtime::abort_forward() {
  const Entry entry(*this);
  tracker_->release_all();
  tracker_->set_tracking(Tracking::kUntracked);
  collectives_->abandon_phase();
  forget_running_step();
}

void Runtime::abort_backward() {
  abort_forward();
  const Entry entry(*this);
  step_->forget_committed();
  step_->cancel_all();
  gradients_->abort_backward();
}

void Runtime::vacate_device(Vacate what) {
  const Entry entry(*this);
  pager_->vacate(what);
}

double Runtime::prepare_step() {
  const Entry entry(*this);
  tracer_.begin_optimizer();
  tracker_->release_all();
  const double sum = gradients_->sum_of_squares();
  recorder_.note_tide(pager_->tide_of_running_moment());
  if (!warmed_up_ && recorder_.position() >= 0) {
    Timeline timeline = recorder_.running();
    agree_on(timeline, {});
    residency_->place_in_margin(timeline);
  }
  return sum;
}

std::vector<std::string> Runtime::agree_on(Timeline& timeline, const std::string& note) {
  StepAgreement agreement = collectives_->agree_on(timeline, note);
  ranks_go_alike_ = ranks_go_alike_ && agreement.alike;
  return std::move(agreement.notes);
}

void Runtime::apply_step(const std::vector<GroupOptions>& groups, double grad_scale) {
  const Entry entry(*this);
  step_->apply(groups, grad_scale);
  ++counters_.num_steps;
  finish_step(StepOutcome::kApplied);
}

void Runtime::skip_step() {
  const Entry entry(*this);
  step_->check_nothing_committed("a skipped step");
  ++counters_.num_skipped_steps;
  step_->cancel_all();
  finish_step(StepOutcome::kSkipped);
}

void Runtime::clear_gradients() {
  const Entry entry(*this);
  if (!gradients_->pending()) return;
  step_->check_nothing_committed("gradients were to be forgotten");
  step_->cancel_all();
  gradients_->clear();
  forget_running_step();
}

void Runtime::clear_gradient(ParamId param) {
  const Entry entry(*this);
  gradients_->clear_param(param);
}

void Runtime::forget_plan() {
  const Entry entry(*this);
  planner_->forget_plan();
}

bool Runtime::has_gradient(ParamId param) {
  const Entry entry(*this);
  return gradients_->has_gradient(param);
}

bool Runtime::gradients_pending() {
  const Entry entry(*this);
  return gradients_->pending();
}

void Runtime::start_trace(TraceReader reader) {
  const Entry entry(*this);
  traces_.ask(reader);
}

std::optional<StepTrace> Runtime::take_trace(TraceReader reader) {
  const Entry entry(*this);
  return traces_.take(reader);
}

void Runtime::forget_running_step() {
  recorder_.abandon_step();
  tracer_.abandon();
}

void Runtime::finish_step(StepOutcome outcome) {
  gradients_->clear();
  for (ParamId param = 0; param < layout().num_params(); ++param) {
    const bool exists = store_.array({layout().placement(param).chunk, ArrayKind::kParam}).exists();
    if (store_.param_state(param) != State::kFree || exists)
      store_.move_param(param, exists ? State::kHold : State::kFree);
  }
  if (recorder_.position() < 0) return tracer_.abandon();
  const bool first = !warmed_up_;
  const Timeline previous = recorder_.last();
  // The optimizer's own moment is not counted: no activations live then, and on CUDA the slots that it makes for
  // optimizer states would be taken for tide.
  recorder_.finish_step();
  if (first) {
    warmed_up_ = true;
    backend_->set_limit_policy(LimitPolicy::kEnforce);
    step_->choose_speculation();
  }
  Timeline last = recorder_.last();
  std::vector<PlanVote> votes;
  for (const std::string& note : agree_on(last, packed(planner_->vote(previous)))) votes.push_back(unpacked_vote(note));
  recorder_.set_last(std::move(last));
  tracer_.end_step(recorder_.last(), outcome);
  residency_->limit_payloads(recorder_.last());
  if (!ranks_go_alike_) return planner_->forget_plan();  // all ranks found so
  planner_->end_step(previous, agreed(votes));
}

void Runtime::reset_report() {
  const Entry entry(*this);
  counters_ = {};
  transfer_.counters() = {};
  backend_->reset_peak();
  arena_.reset_peak();
}

}  // namespace patrickstar
