// Plays a program (plan/program.h) in simulated time. Each lane does one thing after the other. The launching thread
// issues in program order and runs ahead of the device. Host updates that start in backward run in another order:
// parameters that the next forward needs first come first (common/work_queue.h).
//
//   Clock clock(problem, program, rates, shape);
//   clock.play_step();
//   clock.spans()[i];   // begin and end of the i-th instruction
//
// No shared state; any thread may call it.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

#include "plan/chunk_bytes.h"
#include "plan/program.h"
#include "plan/simulator.h"

namespace patrickstar {

// A point in time, and the cause that a stall until then is charged to.
struct When {
  double at = 0;
  Shortage cause = kOnLaunch;
};

inline When later(When a, When b) { return b.at > a.at ? b : a; }

// Device memory for chunk buffers. Bytes become free at known times; take() uses the earliest first.
class Room {
 public:
  explicit Room(int64_t num_bytes) : free_bytes_(num_bytes) {}

  // Returns when the memory is free. Bytes beyond everything that will be freed count as free now.
  When take(int64_t num_bytes) {
    const int64_t now = std::min(num_bytes, free_bytes_);
    free_bytes_ -= now;
    num_bytes -= now;
    When ready;
    while (num_bytes > 0 && next_ < static_cast<std::ptrdiff_t>(coming_.size())) {
      Coming& first = coming_[static_cast<size_t>(next_)];
      const int64_t part = std::min(num_bytes, first.num_bytes);
      ready = {first.at, kOnMemory};
      num_bytes -= part;
      first.num_bytes -= part;
      if (first.num_bytes == 0) ++next_;
    }
    return ready;
  }
  void give(double at, int64_t num_bytes) {
    if (2 * next_ > static_cast<std::ptrdiff_t>(coming_.size()))
      coming_.erase(coming_.begin(), coming_.begin() + std::exchange(next_, 0));
    auto place = coming_.end();
    while (place != coming_.begin() + next_ && (place - 1)->at > at) --place;
    coming_.insert(place, {at, num_bytes});
  }

 private:
  struct Coming {
    double at;
    int64_t num_bytes;
  };

  int64_t free_bytes_;
  std::vector<Coming> coming_;  // from next_ on, ascending: most bytes are given near the end
  std::ptrdiff_t next_ = 0;
};

class Clock {
 public:
  Clock(const PlanProblem& problem, const Program& program, const Rates& rates, const StepShape& shape);

  // Fills everything but `seconds`.
  SimulatedStep play_step();
  // When the launching thread knew the norm of this step, and of the step before.
  double step_end() const { return launch_.at; }
  double step_begin() const { return step_begin_; }
  // One per instruction of the last step. Instructions without duration have begin == end, the launching thread's time.
  const std::vector<Busy>& spans() const { return spans_; }
  // State at the start of the next step: seconds after step_end() until each queue and array is free, then the device
  // memory in use.
  std::vector<double> under_way() const;

 private:
  struct ArrayTimes {
    bool on_device = false;
    When on_device_at;      // end of its upload
    When on_host_at;        // end of the work that makes the host copy
    double busy_until = 0;  // end of copies and collectives that read it on the device
    bool is_round_trip_buffer =
        false;  // a round-trip update made it: uploads wait for it, the launching thread does not
  };

  struct EarlyUpdate {
    size_t instruction = 0;
    ChunkId chunk = 0;
    double ready = 0;            // its gradient is on the host
    int64_t gradient_bytes = 0;  // freed when the update ends
  };

  void issue(size_t index);
  Busy run(const Instruction& instruction);
  Busy begin_access(size_t access);
  Busy compute(size_t access);
  Busy recall(const ActivationCopies& copies);
  Busy offload(const ActivationCopies& copies);
  Busy norm();
  Busy allocate(int array);
  // Issues postponed fetches in order, up to the first whose value is still being made.
  void issue_postponed();
  // Issues the array's postponed fetch. For a sharded array, postponed fetches of other sharded arrays before it go
  // first: all ranks all-gather in one order.
  void await(int array);
  void forget_postponed(int array);  // the array leaves the device before it was fetched
  Busy fetch(int array);
  Busy cast(int array);
  Busy dequantize(int array);
  Busy gather(int array);
  Busy scatter(int array);
  // `ready`: earliest begin, beside the end of compute.
  Busy download(int array, int64_t num_bytes, double ready);
  Busy free(int array);
  Busy inherit(int param);
  Busy update_on_device(ChunkId chunk);
  // The pass that makes the new compute value.
  Busy update_on_host(ChunkId chunk, double begin, double share);
  Busy run_host_adam(ChunkId chunk, double begin, double share);
  void update_in_order_of_need();
  void update_most_needed();
  // The launching thread waits until `num_bytes` of gradient_room_bytes are free.
  void await_gradient_room(int64_t num_bytes);
  // A read begins when a buffer set is free, at the earliest when backward begins.
  Busy load(ChunkId chunk);
  Busy update_from_disk(ChunkId chunk);
  Busy store(ChunkId chunk);
  Busy round_trip_up(ChunkId chunk);
  Busy round_trip_down(ChunkId chunk);
  void wait(When when);
  double dequantize_seconds(int array) const;
  double transfer_seconds(int64_t num_bytes, double gbps) const;
  // Appends work to a queue that is busy until `end`. If the work waited longer for `begin` than it takes, its end
  // carries begin's cause, else `cause`.
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
  std::vector<EarlyUpdate> early_updates_;            // of the running backward, by `ready`
  int64_t waiting_gradient_bytes_ = 0;                // of early_updates_
  std::deque<size_t> postponed_;                      // fetches ahead whose values are still being made
  std::deque<std::pair<int64_t, When>> activations_;  // offloaded activations on their way back: bytes, arrival
  Room room_;
  int64_t used_bytes_ = 0;
  When launch_;  // the launching thread's time, and what it last waited for
  double step_begin_ = 0;
  double compute_end_ = 0;
  double download_end_ = 0;
  double host_adam_end_ = 0;
  double scatter_end_ = 0;
  double backward_begin_ = 0;
  double disk_read_end_ = 0;
  double disk_adam_end_ = 0;
  double disk_write_end_ = 0;
  double round_trip_up_end_ = 0;
  double round_trip_down_end_ = 0;
  std::array<double, kNumRoundTripBuffers> round_trip_buffers_end_{};  // next to be used first
  std::array<double, kNumDiskSets> sets_free_{};                       // next to be used first
  When upload_end_{0, kOnUpload};
  When gather_end_{0, kOnCollective};
  SimulatedStep step_;
};

// Duration of `seconds` of work on a link that other work occupies until `others_end`: both get half the rate
// meanwhile.
double shared_seconds(double begin, double seconds, double others_end);

}  // namespace patrickstar
