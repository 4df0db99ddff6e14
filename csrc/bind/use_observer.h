// The observer: turns calls of modules and uses of tensors, as Python sees them, into acquire and release of the core.
// csrc/plan/use_holds.h says what scopes hold and how backward releases.
//
// What it does runs for every module and every operation on a parameter, so it is C++ from the hook down to the core:
//
//   UseObserver    one per engine: knows the running calls, tells the listener
//   ModuleHook     one per module: its forward hooks
//   BackwardEntry  one per use that autograd saw: called before the use's backward runs
//
// [Note: hooks on nodes] Node.register_prehook goes through Python code that makes an OrderedDict and a
// RemovableHandle. Node._register_hook_dict, with which Tensor.register_hook ends, takes the dict of hooks that a
// tensor carries; a scratch tensor lends it to one node after the other. Such hooks run at the same place, before the
// node, and ours looks at no gradient. Each node keeps its dict, and with it the entry, which keeps the listener:
// graphs may outlive the engine.
//
// One thread at a time, with the GIL: the user's in forward, autograd's in backward. The GIL is released in the core.
#pragma once

#include <pybind11/pybind11.h>

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

// What the backward of an operation needs of its parameters.
enum class BackwardNeed : uint8_t {
  kValue,
  kShape,
};

// func(*args, **kwargs) without __torch_function__. `impl` is torch._C._disabled_torch_function_impl; `kwargs` is a
// dict or None.
pybind11::object call_without_torch_function(const pybind11::object& impl, pybind11::handle func,
                                             pybind11::handle types, pybind11::handle args, pybind11::handle kwargs);

class UseObserver {
 public:
  // `listener` is a UseListener. `find_nodes` gives the distinct autograd nodes that made the tensors in any value.
  UseObserver(pybind11::object listener, pybind11::object find_nodes);

  // Begins a call of `caller`'s module.
  void open_scope(const void* caller, const std::vector<ParamId>& params, HoldUntil until);
  // Ends the innermost call, which must be `caller`'s and gave `output`; nothing when it never began.
  std::optional<Scope> close_scope(const void* caller, pybind11::handle output);
  // Drops what an exception left open.
  void forget_scopes() { scopes_.clear(); }

  // No call of a module is under way: what is read or written then is the user's own access.
  bool is_between_calls() const { return scopes_.empty(); }
  // Values of `params` were given to the user; those that operations read within calls do not count.
  void note_read(const std::vector<ParamId>& params);
  // True where that happened since forget_reads().
  bool was_read(ParamId param) const;
  void forget_reads() { read_.clear(); }

  // The user reads the memory of `params` outside of any operation.
  void touch(const std::vector<ParamId>& params);
  // Around an operation that uses `params`: its result's backward acquires them again.
  Tick begin_use(const std::vector<ParamId>& params);
  void end_use(pybind11::handle result, Tick begin, const std::vector<ParamId>& params, BackwardNeed need);

 private:
  void acquire_before(pybind11::handle result, Use use);
  // The autograd node that made a tensor, or None.
  pybind11::object node_of(pybind11::handle result) const;

  pybind11::object listener_;
  UseListener& listens_;
  ScopeStack scopes_;
  std::vector<uint8_t> read_;  // by parameter, as far as one was read
  pybind11::object find_nodes_;
  pybind11::object tensor_type_;
  pybind11::object scratch_;  // see [Note: hooks on nodes]
  pybind11::object hook_key_ = pybind11::int_(0);
  pybind11::object grad_fn_ = interned("grad_fn");
  pybind11::object base_ = interned("_base");
  pybind11::object backward_hooks_ = interned("_backward_hooks");
  pybind11::object register_hook_dict_ = interned("_register_hook_dict");
};

class ModuleHook {
 public:
  // Without an observer it does nothing: a copy of the user's module (copy.deepcopy, pickle) is an ordinary module.
  ModuleHook(std::shared_ptr<UseObserver> observer, std::vector<ParamId> params, HoldUntil until);

  void before_forward();
  void after_forward(pybind11::handle output);

  // What a call acquires.
  const std::vector<ParamId>& params() const { return params_; }
  // What operations in its calls were seen to use, ascending.
  const std::vector<ParamId>& touched() const { return touched_; }
  HoldUntil until() const { return until_; }
  // Its calls acquire `params` from now on, and no longer note what they use.
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
