// Detector of uses after free, for the build of `make prove-races`. Freed memory is filled with a pattern: who reads it
// computes other numbers. A write into it ends the process when the memory is looked at the next time.
//
// Host memory stays in the arena's lists. Freed device buffers are kept for a while, so that nothing else gets them.
#pragma once

#include <cstdint>

namespace patrickstar {

// Fills memory that is freed.
void mark_freed(void* data, int64_t num_bytes);
// Ends the process unless freed memory still has the pattern.
void check_freed(const void* data, int64_t num_bytes);
// Takes memory from malloc, and frees it later.
void free_later(void* data, int64_t num_bytes);
// Checks and frees all that free_later() holds.
void free_now();

}  // namespace patrickstar
