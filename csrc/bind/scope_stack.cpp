#include "bind/scope_stack.h"

#include <algorithm>
#include <utility>

#include "torch_api/attached_torch.h"

namespace patrickstar::bind {

namespace {

void insert(std::vector<ParamId>& set, ParamId param) {
  const auto place = std::lower_bound(set.begin(), set.end(), param);
  if (place == set.end() || *place != param) set.insert(place, param);
}

void remove(std::vector<ParamId>& set, ParamId param) {
  const auto place = std::lower_bound(set.begin(), set.end(), param);
  if (place != set.end() && *place == param) set.erase(place);
}

}  // namespace

void ScopeStack::open(Scope scope) {
  std::sort(scope.uncovered.begin(), scope.uncovered.end());
  scopes_.push_back(std::move(scope));
}

std::optional<Scope> ScopeStack::close(const void* caller) {
  if (scopes_.empty() || scopes_.back().caller != caller) return std::nullopt;
  std::optional<Scope> scope = std::move(scopes_.back());
  scopes_.pop_back();
  return scope;
}

bool ScopeStack::note_use(const std::vector<ParamId>& params) {
  const bool seen_by_autograd = torch_api().is_grad_enabled();
  if (scopes_.empty()) return seen_by_autograd;
  Scope& scope = scopes_.back();
  for (ParamId param : params) {
    insert(scope.touched, param);
    if (seen_by_autograd) {
      remove(scope.uncovered, param);
    } else if (scope.grad_enabled) {
      insert(scope.uncovered, param);  // inside an autograd.Function, perhaps
    }
  }
  return seen_by_autograd;
}

}  // namespace patrickstar::bind
