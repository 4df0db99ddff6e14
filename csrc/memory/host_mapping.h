// Anonymous memory from mmap, untouched. It is aligned to a huge page if large enough for one, and asks for huge pages.
#pragma once

#include <cstdint>
#include <utility>

namespace patrickstar {

// Throws SystemError. Freed by munmap.
char* map_host_memory(int64_t num_bytes);

class HostMapping {
 public:
  HostMapping() = default;
  explicit HostMapping(int64_t num_bytes) : data_(map_host_memory(num_bytes)), num_bytes_(num_bytes) {}
  ~HostMapping();
  HostMapping(HostMapping&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), num_bytes_(std::exchange(other.num_bytes_, 0)) {}
  HostMapping(const HostMapping&) = delete;
  HostMapping& operator=(const HostMapping&) = delete;
  HostMapping& operator=(HostMapping&&) = delete;

  char* data() const { return data_; }
  int64_t num_bytes() const { return num_bytes_; }

 private:
  char* data_ = nullptr;
  int64_t num_bytes_ = 0;
};

}  // namespace patrickstar
