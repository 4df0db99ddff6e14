// A deterministic scheduler of the core's worker threads: one thread runs at a time, and a seed decides which.
//
// The build of `make prove-races` (proofs/simulated_build.py) takes the files of this folder in place of those of the
// same names in csrc/common. A thread gives its turn away where it submits a task, asks for an event or waits for one.
// The next thread is chosen among those that can go on. So a seed determines the order of all tasks, and repeats it.
//
//   ps_schedule(seed);   // from now on
//   ps_plant(3);         // planted(3) is true: a bug of proofs/planted_races.py
//   ps_trace();          // a hash of all choices since ps_schedule
//
// Threads that nobody scheduled must not use events or queues; the process ends if one does.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <vector>

#include "common/freed_memory.h"

namespace patrickstar {

// True if the bug of this number is planted.
bool planted(int bug);
// A clock that counts its readings.
int64_t scheduled_nanoseconds();

class Scheduler {
 public:
  using Condition = std::function<bool()>;
  struct Thread {
    std::condition_variable turn;
    Condition ready;  // empty: always
    uint64_t priority = 0;
  };

  static Scheduler& get();

  // Begins a new sequence of choices.
  void start(uint64_t seed);
  uint64_t trace() const { return trace_; }
  // Gives the turn away; returns with the turn once `ready` holds. Evaluated by the thread that has the turn.
  void pass(Condition ready = nullptr);
  // Adds a thread that first runs when `ready` holds.
  std::shared_ptr<Thread> add(Condition ready);
  // The calling thread is `thread` from now on; returns when its turn comes.
  void become(const std::shared_ptr<Thread>& thread);
  // The calling thread ends.
  void leave();

 private:
  // Policies of choice, by the seed: uniform; workers only when nothing else can run; by random priorities that change
  // often; by those that change seldom, so that some queues run at once and others fall far behind.
  enum class Policy : uint8_t { kUniform, kLate, kPriorities, kSteady };

  std::shared_ptr<Thread> choose();
  void hand_over(std::unique_lock<std::mutex>& lock);
  void enter();

  std::mutex mutex_;
  std::vector<std::shared_ptr<Thread>> threads_;  // the first is the one that trains
  std::shared_ptr<Thread> current_;
  Policy policy_ = Policy::kUniform;
  std::mt19937_64 random_;
  uint64_t trace_ = 0;
};

}  // namespace patrickstar
