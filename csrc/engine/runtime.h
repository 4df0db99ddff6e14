// The façade of the core: an open engine behind its device's lock. Python's hooks, engine and optimizer call its parts
// through enter(), which keeps the rules of calls (engine/runtime_calls.h); the hooks of each operation have methods.
//
// Calls may come from any thread (on CUDA, backward hooks run on an autograd thread); each takes the lock, and may wait
// for it, so the caller must not hold the Python interpreter. None needs it. Hooks never see the optimizer; the runtime
// never sees an nn.Module. Every call but the destructor throws StateError once the runtime is closed, and in a fork of
// the process that made it (common/process_fork.h).
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "common/process_fork.h"
#include "engine/open_engine.h"
#include "engine/runtime_calls.h"
#include "engine/use_listener.h"

namespace patrickstar {

class Runtime final : public UseListener {
 public:
  // The open engine, for one call, with the lock.
  class Entry {
   public:
    OpenEngine* operator->() const { return open_; }
    OpenEngine& operator*() const { return *open_; }

   private:
    friend class Runtime;
    explicit Entry(Runtime& runtime);

    std::unique_lock<SharedDevice::Lock> lock_;
    OpenEngine* open_;
  };

  Runtime(Layout layout, std::vector<std::string> param_names, const std::vector<std::vector<ParamId>>& module_params,
          const EngineOptions& options, std::shared_ptr<Collectives> collectives,
          std::shared_ptr<KeptRegions> kept = nullptr);
  // Where nobody closed it, what runs with other ranks is aborted: it waits for none of them.
  ~Runtime() override;
  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;

  // Throws StateError where the engine is closed, or the call's rule refuses it.
  Entry enter(Call call, const CallChunks& chunks = CallChunks::all());
  // The same for a call that concerns the parameter's chunk.
  Entry enter(Call call, ParamId param);

  // Ends all threads, frees all memory and gives PyTorch's allocator back, whatever fails meanwhile; throws what failed
  // first. Idempotent. Autograd graphs may outlive the engine and still refer to this object.
  void close();
  bool closed();

  Tick open_scope(const std::vector<ParamId>& params, HoldUntil until) override;
  void close_scope() override;
  Tick tick() override;
  Tick touch(const std::vector<ParamId>& params) override;
  void enter_backward(Tick begin, Tick end, const std::vector<ParamId>& params) override;
  void fold_gradient(ParamId param, const void* data);
  // An activation in host memory is not needed any more (engine/stash.h). Any thread, also after close().
  void drop_activation(Stash::Ticket ticket);

 private:
  void check_process() const;

  const ProcessFork made_in_ = ProcessFork::current();
  std::shared_ptr<SharedDevice::Lock> lock_;  // the device's, which is gone when all of its engines are closed
  std::unique_ptr<OpenEngine> open_;          // null: closed
};

}  // namespace patrickstar
