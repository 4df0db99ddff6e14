// A backend that makes another one late on purpose: a simulated link between host and device, and random delays, which
// show a missing wait on any machine. Neither may change a number.
//
//   auto backend = make_delaying_backend(make_cpu_backend(limit), {.bytes_per_second = 8e9, .latency_seconds = 1e-5});
//
// All else is what the backend inside does.
#pragma once

#include <cstdint>
#include <memory>

#include "backend/backend.h"

namespace patrickstar {

struct DelayOptions {
  double bytes_per_second = 0;    // of the link, each way; 0: as fast as it is
  double latency_seconds = 0;     // of the link, per transfer
  double max_random_seconds = 0;  // before a transfer, before compute, after a wait of a thread of the host's
  uint64_t seed = 0;

  bool simulates_link() const { return bytes_per_second > 0 || latency_seconds > 0; }
  bool is_any() const { return simulates_link() || max_random_seconds > 0; }
};

// `backend` itself where `options` ask for no delay.
std::unique_ptr<Backend> make_delaying_backend(std::unique_ptr<Backend> backend, const DelayOptions& options);

}  // namespace patrickstar
