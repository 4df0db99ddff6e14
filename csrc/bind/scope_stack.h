// The running calls of modules, and what was seen of each.
//
// A *scope* is a running call of a module that has parameters below it. Which parameters it used is told by torch
// functions (module/chunked_parameter.py); a parameter that it holds and no torch function showed is *uncovered*:
// the call may have used it in a way that cannot be seen, so the backward of the call's outputs acquires it.
//
//   scopes.open({&caller, begin, GradMode::is_enabled(), params});
//   if (scopes.note_use(ids)) ...   // autograd will need them again
//   std::optional<Scope> scope = scopes.close(&caller);
//
// Owned by the observer (bind/use_observer.h); one thread at a time.
#pragma once

#include <optional>
#include <vector>

#include "engine/use_listener.h"

namespace patrickstar::bind {

struct Scope {
  const void* caller = nullptr;  // whose call it is; never dereferenced
  Tick begin = 0;
  bool grad_enabled = false;       // when it began
  std::vector<ParamId> uncovered;  // ascending
  std::vector<ParamId> touched;    // ascending: seen in an operation
};

class ScopeStack {
 public:
  void open(Scope scope);
  // The innermost scope, which must be `caller`'s; nothing when its call never began.
  std::optional<Scope> close(const void* caller);
  // An operation in the innermost scope used `params` (maybe none is open). Says whether autograd saw the operation,
  // and so may need them again.
  bool note_use(const std::vector<ParamId>& params);
  bool empty() const { return scopes_.empty(); }
  // Drops what an exception left open.
  void clear() { scopes_.clear(); }

 private:
  std::vector<Scope> scopes_;
};

}  // namespace patrickstar::bind
