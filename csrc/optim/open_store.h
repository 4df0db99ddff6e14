// Where open values ([Note: settled values], kernels.h) are kept from the pass that finds them to the one that makes
// them.
//
// Nobody knows how many there will be: what is at hand is divided among the chunks as they come, each of which may take
// somewhat more than its share of what is left. Where a piece's values find no room, all of the piece are made again.
//
//   store.begin(numel_of_all_chunks);     // of a backward: what was kept is over
//   store.begin_chunk(numel);             // one after the other
//   OpenValues kept = store.keep(open);   // by any thread; a copy, or all
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

#include "optim/kernels.h"

namespace patrickstar::optim {

class OpenStore {
 public:
  struct Memory {
    char* data;
    int64_t num_bytes;
  };

  // What was kept is over.
  void set_memory(std::vector<Memory> memory);
  void begin(int64_t numel);
  void begin_chunk(int64_t numel);
  OpenValues keep(const OpenValues& open);
  // [Note: values in place]: so many have taken the old ones' place. All of them so far, by any thread.
  void note_in_place(int64_t count) { num_in_place_ += count; }
  int64_t num_in_place() const { return num_in_place_; }

 private:
  // `num_bytes` of what is left, or null.
  char* take(int64_t num_bytes);
  int64_t left_bytes() const;

  std::mutex mutex_;
  std::vector<Memory> memory_;
  size_t current_ = 0;  // of `memory_`
  int64_t used_ = 0;    // of the current one
  int64_t coming_numel_ = 0;
  int64_t allowance_ = 0;  // bytes, of the running chunk
  std::atomic<int64_t> num_in_place_{0};
};

}  // namespace patrickstar::optim
