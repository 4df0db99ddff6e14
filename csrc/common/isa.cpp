#include "common/isa.h"

#include <cstdlib>
#include <cstring>
#include <string>

#include "common/check.h"

namespace patrickstar {

namespace {

std::string supported_names() {
  std::string names;
  for (const char* isa : kIsaNames) {
    if (has_isa(isa)) names += (names.empty() ? "" : ", ") + std::string(isa);
  }
  return names;
}

const char* known_name(const char* isa) {
  for (const char* known : kIsaNames) {
    if (std::strcmp(known, isa) == 0) return known;
  }
  return nullptr;
}

const char* choose() {
  const char* wanted = std::getenv("PATRICKSTAR_ISA");
  if (wanted != nullptr && *wanted != '\0') {
    PS_CHECK(has_isa(wanted), ArgumentError, "PATRICKSTAR_ISA is \"", wanted, "\", ",
             known_name(wanted) != nullptr ? "which this processor lacks" : "which is not one of scalar, avx2, avx512",
             "; this processor has ", supported_names(), "; set one of these or unset the variable");
    return known_name(wanted);
  }
  const char* widest = nullptr;
  for (const char* isa : kIsaNames) {
    if (has_isa(isa)) widest = isa;
  }
  return widest;
}

}  // namespace

bool has_isa(const char* isa) {
  if (std::strcmp(isa, "scalar") == 0) return true;
#if defined(__x86_64__)
  if (std::strcmp(isa, "avx2") == 0) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  }
  if (std::strcmp(isa, "avx512") == 0) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  }
#endif
  return false;
}

const char* chosen_isa() {
  static const char* const chosen = choose();
  return chosen;
}

}  // namespace patrickstar
