// Keeps scale-dependent values ([Note: scale-independent values]) from the pass that finds them to the pass that
// computes them.
//
// Their number is unknown in advance. Chunks share the memory in order, and each may take somewhat more than its share
// of the rest. If the values of a piece do not fit, the whole piece is computed again.
//
//   store.begin(numel_of_all_chunks);     // once per backward; drops what was kept
//   store.begin_chunk(numel);             // one chunk after the other
//   ScaleDependentValues kept = store.keep(dependent);   // any thread; a copy, or kAll
//   store.begin_chunk(numel);             // one after the other
//   ScaleDependentValues kept = store.keep(dependent);   // by any thread; a copy, or all
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

#include "optim/kernels.h"

namespace patrickstar::optim {

class ScaleDependentStore {
 public:
  struct Memory {
    char* data;
    int64_t num_bytes;
  };

  // Drops what was kept.
  void set_memory(std::vector<Memory> memory);
  void begin(int64_t numel);
  void begin_chunk(int64_t numel);
  ScaleDependentValues keep(const ScaleDependentValues& dependent);
  // Counts in-place speculative updates ([Note: values in place]). Any thread.
  void note_in_place(int64_t count) { num_in_place_ += count; }
  int64_t num_in_place() const { return num_in_place_; }

 private:
  // Takes `num_bytes` of the rest; null if they do not fit.
  char* take(int64_t num_bytes);
  int64_t left_bytes() const;

  std::mutex mutex_;
  std::vector<Memory> memory_;
  size_t current_ = 0;  // index in `memory_`
  int64_t used_ = 0;    // bytes used of the current memory
  int64_t coming_numel_ = 0;
  int64_t allowance_ = 0;  // bytes left to the current chunk
  std::atomic<int64_t> num_in_place_{0};
};

}  // namespace patrickstar::optim
