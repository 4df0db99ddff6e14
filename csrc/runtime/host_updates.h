// Optimizer updates on the host's threads, beside everything else: on a queue of their own, one after the other, each on
// all threads of the pool.
//
//   Event done = updates.submit({chunk, jobs, restores, carries, {gradient.host_ready}});
//   record.host_ready = done;   // whoever reads the block waits for it
#pragma once

#include "backend/backend.h"
#include "common/queue_delays.h"
#include "common/work_queue.h"
#include "runtime/update_executor.h"

namespace patrickstar {

class HostUpdates final : public UpdateExecutor {
 public:
  HostUpdates(Backend& backend, optim::Compute& compute, Tracer& tracer, QueueDelays& delays, int num_threads);

  Event submit(HostUpdate update) override;
  const UpdateRate& rate() const override { return rate_; }
  // Before the first update: another executor, which needs the same host memory.
  void set_neighbour(const UpdateRate& neighbour) { neighbour_ = &neighbour; }
  // While the neighbour is idle, and while it is busy.
  double params_per_second_alone() const { return alone_.params_per_second(); }
  double params_per_second_beside() const { return beside_.params_per_second(); }

 private:
  void run(const HostUpdate& update, HostSpan* span);

  Backend& backend_;
  optim::Compute& compute_;
  Tracer& tracer_;
  QueueDelays& delays_;
  UpdateRate rate_;
  UpdateRate alone_;
  UpdateRate beside_;
  const UpdateRate* neighbour_ = nullptr;
  WorkQueue queue_;
};

}  // namespace patrickstar
