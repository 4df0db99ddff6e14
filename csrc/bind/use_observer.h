// Turns module calls and tensor uses, as Python sees them, into acquire and release of the core. plan/use_holds.h has
// the rules of holding and releasing. It runs for every module and every operation on a parameter, hence C++
// throughout:
//
//   UseObserver    one per engine: knows the running calls, calls the listener
//   ModuleHook     one per module: its forward hooks
//   BackwardEntry  one per use recorded by autograd: runs before the use's backward
//
// Hooks on nodes. Node.register_prehook runs Python code that makes an OrderedDict and a RemovableHandle.
// Node._register_hook_dict, which Tensor.register_hook ends with, takes the hook dict of a tensor; one scratch tensor
// serves all nodes. These hooks also run before the node. Each node keeps its dict, thereby the entry and the listener,
// since graphs may outlive the engine.
//
// One thread at a time, with the GIL: the user's in forward, autograd's in backward. The core runs without the GIL.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "bind/interned.h"
#include "bind/scope_stack.h"
#include "engine/use_listener.h"

namespace patrickstar::bind {

// A use that ran in [begin, end].
struct Use {
  Tick begin;
  Tick end;
  std::vector<ParamId> params;
};

// Property of its parameters that an operation's backward needs.
enum class BackwardNeed : uint8_t {
  kValue,
  kShape,
};

// func(*args, **kwargs) without __torch_function__. `impl`: torch._C._disabled_torch_function_impl. `kwargs`: dict or
// None.
nanobind::object call_without_torch_function(const nanobind::object& impl, nanobind::handle func,
                                             nanobind::handle types, nanobind::handle args, nanobind::handle kwargs);

class UseObserver {
 public:
  // `listener`: a UseListener. `find_nodes(value)` returns the distinct autograd nodes of all tensors in a value.
  UseObserver(nanobind::object listener, nanobind::object find_nodes);

  // `caller` identifies the module's hook.
  void open_scope(const void* caller, const std::vector<ParamId>& params, HoldUntil until);
  // Ends `caller`'s call, the innermost one, with its `output`. Returns nothing if the call never began.
  std::optional<Scope> close_scope(const void* caller, nanobind::handle output);
  // Drops calls that an exception left open.
  void forget_scopes() { scopes_.clear(); }

  // True outside all module calls, where reads and writes are the user's own.
  bool is_between_calls() const { return scopes_.empty(); }
  // Records that the user got values of `params`. Reads within module calls do not count.
  void note_read(const std::vector<ParamId>& params);
  // True after note_read(), until forget_reads().
  bool was_read(ParamId param) const;
  void forget_reads() { read_.clear(); }

  // The user reads the memory of `params` outside any operation.
  void touch(const std::vector<ParamId>& params);
  // Call before and after an operation that uses `params`; the backward of its result acquires them again.
  Tick begin_use(const std::vector<ParamId>& params);
  void end_use(nanobind::handle result, Tick begin, const std::vector<ParamId>& params, BackwardNeed need);

 private:
  void acquire_before(nanobind::handle result, Use use);
  // None if no node made it. A view's node is that of its base, which in-place changes of the view do not replace.
  nanobind::object node_of(nanobind::handle result) const;

  nanobind::object listener_;
  UseListener& listens_;
  ScopeStack scopes_;
  std::vector<uint8_t> read_;  // by parameter; may be shorter
  nanobind::object find_nodes_;
  nanobind::object tensor_type_;
  nanobind::object scratch_;  // lends its hook dict to nodes
  nanobind::object hook_key_ = nanobind::int_(0);
  nanobind::object grad_fn_ = interned("grad_fn");
  nanobind::object base_ = interned("_base");
  nanobind::object backward_hooks_ = interned("_backward_hooks");
  nanobind::object register_hook_dict_ = interned("_register_hook_dict");
};

class ModuleHook {
 public:
  // A null observer does nothing: copies of the user's module (copy.deepcopy, pickle) are ordinary modules.
  ModuleHook(std::shared_ptr<UseObserver> observer, std::vector<ParamId> params, HoldUntil until);

  void before_forward();
  void after_forward(nanobind::handle output);

  // Parameters that a call acquires.
  const std::vector<ParamId>& params() const { return params_; }
  // Parameters that operations in its calls used, ascending.
  const std::vector<ParamId>& touched() const { return touched_; }
  HoldUntil until() const { return until_; }
  // From now on calls acquire `params` and no longer record uses.
  void finish_learning(std::vector<ParamId> params);

 private:
  enum class Stage : uint8_t { kLearning, kLearned };

  std::shared_ptr<UseObserver> observer_;
  std::vector<ParamId> params_;
  std::vector<ParamId> touched_;
  HoldUntil until_ = HoldUntil::kScopeEnd;
  Stage stage_ = Stage::kLearning;
};

}  // namespace patrickstar::bind
