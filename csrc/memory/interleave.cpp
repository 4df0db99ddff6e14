#include "memory/interleave.h"

#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

namespace patrickstar {

namespace {

constexpr size_t kBitsPerWord = 8 * sizeof(unsigned long);

bool has_default_policy() {
  int mode = MPOL_DEFAULT;
  return syscall(SYS_get_mempolicy, &mode, nullptr, 0UL, nullptr, 0UL) == 0 && mode == MPOL_DEFAULT;
}

// Tries on a page of its own.
bool can_interleave(const std::vector<int>& nodes) {
  const auto num_bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  void* page = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) return false;
  const bool agreed = interleave_pages(page, static_cast<int64_t>(num_bytes), nodes);
  munmap(page, num_bytes);
  return agreed;
}

}  // namespace

std::vector<int> nodes_to_interleave(const std::vector<int>& nodes) {
  if (nodes.size() < 2 || !has_default_policy() || !can_interleave(nodes)) return {};
  return nodes;
}

bool interleave_pages(void* data, int64_t num_bytes, const std::vector<int>& nodes) {
  if (nodes.empty()) return false;
  const auto highest = static_cast<size_t>(*std::max_element(nodes.begin(), nodes.end()));
  std::vector<unsigned long> mask(highest / kBitsPerWord + 1);
  for (const int node : nodes) {
    const auto bit = static_cast<size_t>(node);
    mask[bit / kBitsPerWord] |= 1UL << (bit % kBitsPerWord);
  }
  // The kernel reads one bit less than the given count.
  return syscall(SYS_mbind, data, static_cast<unsigned long>(num_bytes), MPOL_INTERLEAVE, mask.data(),
                 mask.size() * kBitsPerWord + 1, 0UL) == 0;
}

}  // namespace patrickstar
