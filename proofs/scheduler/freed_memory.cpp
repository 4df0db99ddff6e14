#include "common/freed_memory.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <utility>

namespace patrickstar {

namespace {

constexpr int kPattern = 0xff;  // NaN in each floating point type
constexpr int64_t kMostHeldBytes = int64_t{4} << 20;

std::mutex held_mutex;
std::deque<std::pair<void*, int64_t>> held;
int64_t held_bytes = 0;

void free_oldest() {
  const auto [data, num_bytes] = held.front();
  held.pop_front();
  held_bytes -= num_bytes;
  check_freed(data, num_bytes);
  std::free(data);
}

}  // namespace

void mark_freed(void* data, int64_t num_bytes) { std::memset(data, kPattern, static_cast<size_t>(num_bytes)); }

void check_freed(const void* data, int64_t num_bytes) {
  const auto* begin = static_cast<const unsigned char*>(data);
  const unsigned char* const end = begin + num_bytes;
  const auto* written = std::find_if(begin, end, [](unsigned char byte) { return byte != kPattern; });
  if (written == end) return;
  std::fprintf(stderr, "schedule: byte %td of %td that are free was written\n", written - begin, end - begin);
  std::abort();
}

void free_later(void* data, int64_t num_bytes) {
  mark_freed(data, num_bytes);
  const std::lock_guard<std::mutex> lock(held_mutex);
  held.emplace_back(data, num_bytes);
  held_bytes += num_bytes;
  while (held_bytes > kMostHeldBytes) free_oldest();
}

void free_now() {
  const std::lock_guard<std::mutex> lock(held_mutex);
  while (!held.empty()) free_oldest();
}

}  // namespace patrickstar
