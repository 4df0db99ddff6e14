// The running module calls, and the parameters seen in each.
//
// A *scope* is a running call of a module with parameters. Torch functions report which parameters it uses
// (module/chunked_parameter.py). A parameter that it holds without such a report is *uncovered*: the call may have used
// it in an invisible way, so the backward of the call's outputs acquires it.
//
//   scopes.open({&caller, begin, GradMode::is_enabled(), params});
//   if (scopes.note_use(ids)) ...   // autograd will need them again
//   std::optional<Scope> scope = scopes.close(&caller);
//
// Owned by the UseObserver; one thread at a time.
#pragma once

#include <optional>
#include <vector>

#include "engine/use_listener.h"

namespace patrickstar::bind {

struct Scope {
  const void* caller = nullptr;  // the module hook; never dereferenced
  Tick begin = 0;
  bool grad_enabled = false;       // at its begin
  std::vector<ParamId> uncovered;  // ascending
  std::vector<ParamId> touched;    // ascending: seen in an operation
};

class ScopeStack {
 public:
  void open(Scope scope);
  // Closes the innermost scope if it is `caller`'s, else returns nothing: that call never began.
  std::optional<Scope> close(const void* caller);
  // Reports parameters used by an operation. True if autograd recorded the operation and may need them again.
  bool note_use(const std::vector<ParamId>& params);
  bool empty() const { return scopes_.empty(); }
  // Drops scopes that an exception left open.
  void clear() { scopes_.clear(); }

 private:
  std::vector<Scope> scopes_;
};

}  // namespace patrickstar::bind
