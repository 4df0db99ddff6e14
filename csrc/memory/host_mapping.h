// Anonymous memory from mmap, which starts at a huge page when it is large enough to hold one, and asks for huge ones.
// Its pages are there when they are first touched.
#pragma once

#include <cstdint>
#include <utility>

namespace patrickstar {

// Throws SystemError. Given back by munmap.
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
