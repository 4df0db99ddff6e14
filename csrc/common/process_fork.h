// Whether a process is a fork of the one in which something was made.
//
// A fork (a DataLoader's worker, a subprocess of multiprocessing) has a copy of all memory, but none of the threads:
// who waits there for a queue's worker waits for ever, and a lock that was held stays held. So whoever has threads
// remembers where it was made, and refuses to be used elsewhere.
//
//   const ProcessFork made_in = ProcessFork::current();
//   made_in.is_here();   // false in a fork; costs a load
//
// Any thread.
#pragma once

#include <cstdint>

namespace patrickstar {

class ProcessFork {
 public:
  static ProcessFork current();

  bool is_here() const { return generation_ == current().generation_; }

 private:
  explicit ProcessFork(uint64_t generation) : generation_(generation) {}

  uint64_t generation_;  // forks between the first process and this one
};

}  // namespace patrickstar
