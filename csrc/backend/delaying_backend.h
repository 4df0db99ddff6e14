// A backend that delays another one on purpose: a simulated link between host and device, and random delays that expose
// missing waits. No delay may change a result.
//
//   auto backend = make_delaying_backend(make_cpu_backend(limit), {.bytes_per_second = 8e9, .latency_seconds = 1e-5});
#pragma once

#include <cstdint>
#include <memory>

#include "backend/backend.h"

namespace patrickstar {

struct DelayOptions {
  double bytes_per_second = 0;    // of the link, per direction; 0: no limit
  double latency_seconds = 0;     // of the link, per transfer
  double max_random_seconds = 0;  // before a transfer, before compute, after synchronize()
  uint64_t seed = 0;

  bool simulates_link() const { return bytes_per_second > 0 || latency_seconds > 0; }
  bool is_any() const { return simulates_link() || max_random_seconds > 0; }
};

// Returns `backend` itself if `options` set no delay.
std::unique_ptr<Backend> make_delaying_backend(std::unique_ptr<Backend> backend, const DelayOptions& options);

}  // namespace patrickstar
