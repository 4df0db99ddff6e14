#include "memory/host_mapping.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>

#include "common/check.h"
#include "common/sizes.h"
#include "common/types.h"

namespace patrickstar {

namespace {

constexpr int64_t kHugePage = int64_t{2} << 20;

}  // namespace

char* map_host_memory(int64_t num_bytes) {
  const int64_t slack = num_bytes >= kHugePage ? kHugePage : 0;
  void* mapped = mmap(nullptr, static_cast<size_t>(num_bytes + slack), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  PS_CHECK(mapped != MAP_FAILED, SystemError, "cannot map ", show_exactly(num_bytes),
           " of host memory: ", std::strerror(errno), "; lower host_memory");
  if (slack == 0) return static_cast<char*>(mapped);
  const auto address = reinterpret_cast<int64_t>(mapped);
  const int64_t begin = round_up(address, kHugePage);
  if (begin > address) munmap(mapped, static_cast<size_t>(begin - address));
  const int64_t tail = address + num_bytes + slack - (begin + num_bytes);
  if (tail > 0) munmap(reinterpret_cast<void*>(begin + num_bytes), static_cast<size_t>(tail));
  madvise(reinterpret_cast<void*>(begin), static_cast<size_t>(num_bytes), MADV_HUGEPAGE);  // a hint, may fail
  return reinterpret_cast<char*>(begin);
}

HostMapping::~HostMapping() {
  if (data_ != nullptr) munmap(data_, static_cast<size_t>(num_bytes_));
}

}  // namespace patrickstar
