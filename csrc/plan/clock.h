// The Clock: plays a program (plan/program.h) on queues that know seconds and bytes. Each lane does one thing after the
// other; the launching thread issues in program order and runs ahead of the device. Updates ahead of the norm alone are
// made in another order ([Note: the order of need]).
//
//   Clock clock(problem, program, rates, shape);
//   clock.play_step();
//   clock.spans()[i];   // when the i-th instruction was carried out
//
// Nothing here is shared; any thread may call it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <set>
#include <utility>
#include <vector>

#include "plan/chunk_bytes.h"
#include "plan/program.h"
#include "plan/simulator.h"

namespace patrickstar {

// A point in time, and what the compute queue would be waiting for if it waited until then.
struct When {
  double at = 0;
  Shortage cause = kOnLaunch;
};

inline When later(When a, When b) { return b.at > a.at ? b : a; }

// Device memory for payloads, in bytes that become free at certain times; the first to be free is taken first.
class Room {
 public:
  explicit Room(int64_t num_bytes) : free_bytes_(num_bytes) {}

  // Time at which the memory is free. Bytes beyond all that will be free count as free.
  When take(int64_t num_bytes) {
    const int64_t now = std::min(num_bytes, free_bytes_);
    free_bytes_ -= now;
    num_bytes -= now;
    When ready;
    while (num_bytes > 0 && !coming_.empty()) {
      const auto first = coming_.begin();
      const int64_t part = std::min(num_bytes, first->second);
      ready = {first->first, kOnMemory};
      num_bytes -= part;
      if (part < first->second) coming_.emplace(first->first, first->second - part);
      coming_.erase(first);
    }
    return ready;
  }
  void give(double at, int64_t num_bytes) { coming_.emplace(at, num_bytes); }

 private:
  int64_t free_bytes_;
  std::multiset<std::pair<double, int64_t>> coming_;
};

class Clock {
 public:
  Clock(const PlanProblem& problem, const Program& program, const Rates& rates, const StepShape& shape);

  // Plays one step; what it returns has everything but the step's length.
  SimulatedStep play_step();
  // When the launching thread knew the norm of the last step, and of the one before.
  double step_end() const { return launch_.at; }
  double step_begin() const { return step_begin_; }
  // By instruction of the last step. Those that take no time have begin and end where the launching thread was.
  const std::vector<Busy>& spans() const { return spans_; }
  // The state that the next step begins with: seconds after step_end() at which each queue and each array is free, and
  // the device memory in use.
  std::vector<double> under_way() const;

 private:
  struct ArrayTimes {
    bool on_device = false;
    When on_device_at;        // its upload is over
    When on_host_at;          // what makes the host's copy is over
    double busy_until = 0;    // copies and collectives that read it on the device
    bool is_visitor = false;  // the device made it, so that uploads wait for it and not the launching thread
  };

  struct EarlyUpdate {
    size_t instruction = 0;
    ChunkId chunk = 0;
    double ready = 0;            // its gradient is on the host
    int64_t gradient_bytes = 0;  // that end with it
  };

  void issue(size_t index);
  Busy run(const Instruction& instruction);
  Busy begin_moment(size_t moment);
  Busy compute(size_t moment);
  Busy recall(const ActivationCopies& copies);
  Busy offload(const ActivationCopies& copies);
  Busy norm();
  Busy allocate(int array);
  // Issues postponed fetches in order, up to the first whose value is still being made.
  void issue_postponed();
  // Issues the array's postponed fetch; where ranks share it also those before it that they share, since all ranks
  // gather in one order.
  void await(int array);
  void forget_postponed(int array);  // it leaves the device before it came
  Busy fetch(int array);
  Busy cast(int array);
  Busy dequantize(int array);
  Busy gather(int array);
  Busy scatter(int array);
  // `ready`: when there is something to send, apart from what compute makes.
  Busy download(int array, int64_t num_bytes, double ready);
  Busy free(int array);
  Busy inherit(int param);
  Busy update_on_device(ChunkId chunk);
  // The pass that makes the new compute value.
  Busy update_on_host(ChunkId chunk, double begin, double share);
  Busy run_host_adam(ChunkId chunk, double begin, double share);
  // Updates ahead of the norm, in the order in which the host makes them.
  void update_in_order_of_need();
  void update_most_needed();
  // The launching thread waits until updates have left so much to a gradient.
  void await_gradient_room(int64_t num_bytes);
  // [Note: states on the disk] Reads begin when a set is free, from the beginning of backward on.
  Busy load(ChunkId chunk);
  Busy update_from_disk(ChunkId chunk);
  Busy store(ChunkId chunk);
  Busy visit_up(ChunkId chunk);
  Busy visit_down(ChunkId chunk);
  void wait(When when);
  double dequantize_seconds(int array) const;
  double transfer_seconds(int64_t num_bytes, double gbps) const;
  // Appends work to a queue that is busy until `end`. The result's cause is what held the work up, where that takes
  // longer than the work.
  Busy enqueue(When& end, When begin, double seconds, Shortage cause) const;
  bool is_sharded(int array) const { return shape_.is_sharded(ArrayId::from_index(array).chunk); }
  bool is_postponed(int array) const;

  ArrayTimes& times(int array) { return arrays_[static_cast<size_t>(array)]; }
  ArrayTimes& param(ChunkId chunk) { return times(ArrayId{chunk, ArrayKind::kParam}.index()); }
  ArrayTimes& grad(ChunkId chunk) { return times(ArrayId{chunk, ArrayKind::kGrad}.index()); }
  const ArrayCost& cost(int array) const { return problem_.arrays[static_cast<size_t>(array)]; }
  int64_t numel(ChunkId chunk) const { return shape_.numels[static_cast<size_t>(chunk)]; }
  const Instruction& at(size_t index) const { return program_.instructions[index]; }

  const PlanProblem& problem_;
  const Program& program_;
  const Rates& rates_;
  const StepShape& shape_;
  std::vector<ArrayTimes> arrays_;
  std::vector<Busy> spans_;
  std::vector<EarlyUpdate> early_updates_;            // of the running backward, by when they are ready
  int64_t waiting_gradient_bytes_ = 0;                // of these
  std::deque<size_t> postponed_;                      // fetches ahead whose values are being made
  std::deque<std::pair<int64_t, When>> activations_;  // that come back: bytes, and when they are there
  Room room_;
  int64_t used_bytes_ = 0;
  When launch_;  // the launching thread's clock, and what it last waited for
  double step_begin_ = 0;
  double compute_end_ = 0;
  double download_end_ = 0;
  double host_adam_end_ = 0;
  double scatter_end_ = 0;
  double backward_begin_ = 0;
  double disk_read_end_ = 0;
  double disk_adam_end_ = 0;
  double disk_write_end_ = 0;
  double visit_up_end_ = 0;
  double visit_down_end_ = 0;
  std::array<double, kNumVisitors> visitors_end_{};  // the next one first
  std::array<double, kNumDiskSets> sets_free_{};     // when each is, the next one first
  When upload_end_{0, kOnUpload};
  When gather_end_{0, kOnCollective};
  SimulatedStep step_;
};

// Seconds of work on a link that others use until `others_end`: two at once get half of it each.
double shared_seconds(double begin, double seconds, double others_end);

}  // namespace patrickstar
