// An open engine behind its device's lock. Python's hooks, engine and optimizer reach its parts through enter(), which
// checks the call's rule (engine/runtime_calls.h). Hooks that run per operation have methods of their own.
//
// Calls may come from any thread; on CUDA, backward hooks run on an autograd thread. Each call takes the lock and may
// wait for it, so the caller must release the Python interpreter. Hooks never see the optimizer; the runtime never sees
// an nn.Module. After close(), and in a forked process (common/process_fork.h), every call but the destructor throws
// StateError.
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

class Runtime : public UseListener {
 public:
  // The open engine during one call, with the lock held.
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
  ~Runtime() override { abandon(); }
  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;

  // Throws StateError if the engine is closed, or if the call's rule refuses it.
  Entry enter(Call call, const CallChunks& chunks = CallChunks::all());
  Entry enter(Call call, ParamId param);

  // Ends all threads, frees all memory and restores PyTorch's allocator; a failure does not stop the rest. Throws the
  // first failure. Idempotent. Autograd graphs may outlive the engine and refer to this object.
  void close();
  // Closes without waiting for other ranks: aborts running operations with them. Ignores failures.
  void abandon() noexcept;
  bool closed();

  Tick open_scope(const std::vector<ParamId>& params, HoldUntil until) override;
  void close_scope() override;
  Tick tick() override;
  Tick touch(const std::vector<ParamId>& params) override;
  void enter_backward(Tick begin, Tick end, const std::vector<ParamId>& params) override;
  void accumulate_gradient(ParamId param, const void* data);
  // Releases an activation in host memory (engine/offload_store.h). Any thread, also after close().
  void drop_activation(OffloadStore::Ticket ticket);

 private:
  void check_process() const;

  const ProcessFork made_in_ = ProcessFork::current();
  // the device's; it outlives the device, which ends with its last open engine
  std::shared_ptr<SharedDevice::Lock> lock_;
  std::unique_ptr<OpenEngine> open_;  // null: closed
};

}  // namespace patrickstar
