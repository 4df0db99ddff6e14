// Delays that a run is given on purpose: a simulated link between host and device, and random ones on every queue, which
// show a missing wait on any machine. Neither may change a number.
//
//   QueueDelays delays({.bytes_per_second = 8e9, .latency_seconds = 1e-5});
//   backend.delay(Queue::kUpload, delays.transfer_seconds(num_bytes));
//
// Any thread may call any method.
#pragma once

#include <cstdint>
#include <mutex>
#include <random>

namespace patrickstar {

struct DelayOptions {
  double bytes_per_second = 0;    // of the link, each way; 0: as fast as it is
  double latency_seconds = 0;     // of the link, per transfer
  double max_random_seconds = 0;  // before a transfer, a moment of compute, an update on the host
  uint64_t seed = 0;

  bool simulates_link() const { return bytes_per_second > 0 || latency_seconds > 0; }
};

class QueueDelays {
 public:
  explicit QueueDelays(const DelayOptions& options) : options_(options), generator_(options.seed) {}

  // How long a transfer keeps its queue busy beside the copy itself.
  double transfer_seconds(int64_t num_bytes) {
    const double link = options_.bytes_per_second > 0 ? static_cast<double>(num_bytes) / options_.bytes_per_second : 0;
    return options_.latency_seconds + link + random_seconds();
  }
  double random_seconds() {
    if (options_.max_random_seconds <= 0) return 0;
    const std::lock_guard<std::mutex> lock(mutex_);
    return std::uniform_real_distribution<double>(0, options_.max_random_seconds)(generator_);
  }

 private:
  DelayOptions options_;
  std::mutex mutex_;
  std::mt19937_64 generator_;
};

}  // namespace patrickstar
