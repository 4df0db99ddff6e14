#include "runtime/victims.h"

#include <algorithm>

#include "chunk/chunk_store.h"

namespace patrickstar {

namespace {

int64_t farness(const Victim& victim, int64_t num_moments) {
  if (is_optimizer_state(victim.id.kind)) return 0;
  return victim.dirty ? std::min(victim.next_use, num_moments) : victim.next_use;
}

}  // namespace

bool is_optimizer_state(ArrayKind kind) {
  const OptimizerArrays states = optimizer_arrays();
  return std::find(states.begin(), states.end(), kind) != states.end();
}

void sort_victims(std::vector<Victim>& victims, int64_t num_moments) {
  std::sort(victims.begin(), victims.end(), [num_moments](const Victim& a, const Victim& b) {
    const int64_t far_a = farness(a, num_moments);
    const int64_t far_b = farness(b, num_moments);
    return far_a != far_b ? far_a > far_b : a.last_use < b.last_use;
  });
}

}  // namespace patrickstar
