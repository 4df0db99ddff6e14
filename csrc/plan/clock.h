// The Clock: plays the steps of a plan on queues that know seconds and bytes (plan/simulator.h).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <set>
#include <utility>
#include <vector>

#include "plan/chunk_bytes.h"
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
  Clock(const PlanProblem& problem, const Plan& plan, const Rates& rates, const StepShape& shape);

  // Plays one step; what it returns has everything but the step's length.
  SimulatedStep play_step();
  // When the launching thread knew the norm of the last step.
  double step_end() const { return launch_.at; }
  // The state that the next step begins with: seconds after step_end() at which each queue and each array is free, and
  // the device memory in use.
  std::vector<double> under_way() const;

 private:
  struct ArrayTimes {
    bool on_device = false;
    When on_device_at;        // its upload is over
    When on_host_at;          // what makes the host's copy is over
    bool is_visitor = false;  // the device made it, so that uploads wait for it and not the launching thread
    bool has_left = false;    // a gradient that is to come back for its update
  };

  struct EarlyUpdate {
    ChunkId chunk = 0;
    double ready = 0;            // its gradient is on the host
    int64_t gradient_bytes = 0;  // that end with it
  };

  void play_moment(size_t t);
  void bring_activations(const ActivationCopies& copies);
  void send_activations(const ActivationCopies& copies);
  void finish_step();
  void update(ChunkId chunk);
  // The pass that makes the new compute value.
  void update_on_host(ChunkId chunk, double begin);
  // Updates that begin in backward, in the order in which the host makes them.
  void update_in_order_of_need();
  void update_most_needed();
  // The launching thread waits until updates have left so much to a gradient.
  void await_gradient_room(int64_t num_bytes);
  const RecipeRow& recipe(ChunkId chunk) const { return row_of(shape_.updates[static_cast<size_t>(chunk)]); }
  // [Note: visits] Returns when the gradient is used.
  double visit(ChunkId chunk, double begin);
  // [Note: states on the disk] Reads begin when a set is free, from the beginning of backward on.
  void update_through_disk(ChunkId chunk, double begin);
  void make_room(int64_t num_bytes);
  void run_host_adam(ChunkId chunk, double begin, double share);
  void prefetch(const std::vector<ArrayId>& arrays);
  void bring_postponed(int last);
  void bring(int array);
  void upload(int array, When begin);
  // 0 where its value is not made so.
  double dequantize_seconds(int array) const;
  void gather(int array, When begin);
  double scatter(int array);
  // `ready`: when there is something to send, apart from what compute makes.
  double download(int array, int64_t num_bytes, double ready = 0);
  void retire(ArrayId grad, size_t moment);
  void evict(int array);
  void release(int array, double at);
  void wait(When when);
  void run(double seconds) { compute_end_ += seconds; }
  // Appends work to a queue that is busy until `end`. The result's cause is what held the work up, where that takes
  // longer than the work.
  When enqueue(When& end, When begin, double seconds, Shortage cause) const;
  bool is_sharded() const { return shape_.num_ranks > 1; }
  int64_t others_bytes(int array) const { return cost(array).num_bytes / shape_.num_ranks * (shape_.num_ranks - 1); }

  ArrayTimes& times(int array) { return arrays_[static_cast<size_t>(array)]; }
  const ArrayCost& cost(int array) const { return problem_.arrays[static_cast<size_t>(array)]; }
  int64_t numel(ChunkId chunk) const { return shape_.numels[static_cast<size_t>(chunk)]; }

  const PlanProblem& problem_;
  const Plan& plan_;
  const Rates& rates_;
  const StepShape& shape_;
  std::vector<ArrayTimes> arrays_;
  std::vector<size_t> last_use_;            // by array: the last moment that reads or writes it
  std::vector<EarlyUpdate> early_updates_;  // of the running backward, by when they are ready
  int64_t waiting_gradient_bytes_ = 0;      // of these
  std::deque<int> postponed_;
  std::deque<std::pair<int64_t, When>> activations_;  // that come back: bytes, and when they are there
  Room room_;
  int64_t used_bytes_ = 0;
  When launch_;  // the launching thread's clock, and what it last waited for
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
// Activations at a moment, as a plan counts them.
int64_t tide(const PlanProblem& problem, size_t moment);

}  // namespace patrickstar
