// Everything the runtime counts, in one struct; Python's report() is made of it.
#pragma once

#include <cstdint>

namespace patrickstar {

struct Counters {
  int64_t num_evictions = 0;           // arrays pushed off the device while still of use
  int64_t num_prefetch_hits = 0;       // arrays that were on the device, or on their way, because the plan said so
  int64_t num_pressure_evictions = 0;  // of the evictions, those because something else needed device memory
  int64_t num_on_demand_fetches = 0;   // arrays brought in at the moment of their use
  int64_t gathered_bytes = 0;          // that came from other ranks' shards of values
  int64_t scattered_bytes = 0;         // of gradients, that came from other ranks
  int64_t num_moments = 0;
  int64_t num_replayed_moments = 0;  // moments that went as planned
  int64_t num_plans = 0;
  int64_t num_steps = 0;
  int64_t num_skipped_steps = 0;
  int64_t num_speculated_updates = 0;  // of chunks, started on the host before the step was decided
  int64_t num_committed_updates = 0;   // of chunks, made on the host before the step, for good
  int64_t num_updates_taken_over = 0;  // of those, as the step turned out to be
};

}  // namespace patrickstar
