#include "engine/runtime.h"

#include <exception>
#include <utility>

#include "common/check.h"

namespace patrickstar {

Runtime::Runtime(Layout layout, std::vector<std::string> param_names,
                 const std::vector<std::vector<ParamId>>& module_params, const EngineOptions& options,
                 std::shared_ptr<Collectives> collectives, std::shared_ptr<KeptRegions> kept) {
  const std::shared_ptr<SharedDevice> device = SharedDevice::open(options.device);
  lock_ = device->lock();
  const std::lock_guard<SharedDevice::Lock> lock(*lock_);
  open_ = std::make_unique<OpenEngine>(device, std::move(layout), std::move(param_names), module_params, options,
                                       std::move(collectives), std::move(kept));
}

void Runtime::abandon() noexcept {
  if (!made_in_.is_here()) {
    open_.release();  // its threads belong to the other process
    return;
  }
  if (open_ == nullptr) return;
  open_->collectives->abort();
  try {
    close();
  } catch (const std::exception&) {  // memory is freed all the same
  }
}

void Runtime::check_process() const {
  PS_CHECK(
      made_in_.is_here(), StateError,
      "this process is a fork of the one that made this engine (a DataLoader worker, a subprocess?), and has none of "
      "its threads; use the engine in the process that made it, and hand tensors to forks");
}

Runtime::Entry::Entry(Runtime& runtime) : lock_((runtime.check_process(), *runtime.lock_)), open_(runtime.open_.get()) {
  PS_CHECK(open_ != nullptr, StateError,
           "this engine is closed, but something of it is still used (the backward of an old loss?); "
           "build a new engine to train on");
}

Runtime::Entry Runtime::enter(Call call, const CallChunks& chunks) {
  Entry open(*this);
  begin_call(*open, call, chunks);
  return open;
}

Runtime::Entry Runtime::enter(Call call, ParamId param) {
  Entry open(*this);
  begin_call(*open, call, CallChunks::of(open->layout().placement(param).chunk));
  return open;
}

void Runtime::close() {
  check_process();
  std::shared_ptr<SharedDevice> device;  // destroyed after the lock is released, if no other engine has it
  const std::lock_guard<SharedDevice::Lock> lock(*lock_);
  const std::unique_ptr<OpenEngine> open = std::move(open_);
  if (open == nullptr) return;
  device = open->device;
  open->shut_down();
}

bool Runtime::closed() {
  check_process();
  const std::lock_guard<SharedDevice::Lock> lock(*lock_);
  return open_ == nullptr;
}

Tick Runtime::open_scope(const std::vector<ParamId>& params, HoldUntil until) {
  return enter(Call::kUse, CallChunks::of(params))->tracker.open_scope(params, until);
}

void Runtime::close_scope() { enter(Call::kDevice)->tracker.close_scope(); }

Tick Runtime::tick() { return enter(Call::kInspect)->tracker.tick(); }

Tick Runtime::touch(const std::vector<ParamId>& params) {
  return enter(Call::kUse, CallChunks::of(params))->tracker.touch(params);
}

void Runtime::enter_backward(Tick begin, Tick end, const std::vector<ParamId>& params) {
  enter(Call::kUse, CallChunks::of(params))->tracker.enter_backward(begin, end, params);
}

void Runtime::accumulate_gradient(ParamId param, const void* data) {
  enter(Call::kAccumulate)->flow.accumulate(param, data);
}

void Runtime::drop_activation(OffloadStore::Ticket ticket) {
  if (!made_in_.is_here()) return;
  const std::lock_guard<SharedDevice::Lock> lock(*lock_);
  if (open_) open_->offload_store.drop(ticket);
}

}  // namespace patrickstar
