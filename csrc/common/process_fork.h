// Tells whether the process is a fork of the one that created an object.
//
// A fork (a DataLoader worker, multiprocessing) has a copy of the memory but none of the threads. Waiting for a worker
// thread there would never end, and a lock held at the fork stays held. Owners of threads therefore remember their
// process and refuse calls in a fork. Any thread.
//
//   const ProcessFork made_in = ProcessFork::current();
//   made_in.is_here();   // false in a fork; costs a load
#pragma once

#include <cstdint>

namespace patrickstar {

class ProcessFork {
 public:
  static ProcessFork current();

  bool is_here() const { return generation_ == current().generation_; }

 private:
  explicit ProcessFork(uint64_t generation) : generation_(generation) {}

  uint64_t generation_;  // number of forks between the first process and this one
};

}  // namespace patrickstar
