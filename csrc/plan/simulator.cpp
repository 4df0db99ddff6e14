#include "plan/simulator.h"

#include <algorithm>
#include <cmath>
#include <deque>
#include <numeric>
#include <set>
#include <utility>

#include "common/check.h"
#include "plan/chunk_bytes.h"

namespace patrickstar {

namespace {

// Enough for updates on the host, if they are the slowest, to fall behind as far as they can; the last half is
// averaged. Steps that go on as they were are not played again.
constexpr int kSteps = 16;
constexpr double kSameSeconds = 1e-9;

// A point in time, and what the compute queue would be waiting for if it waited until then.
struct When {
  double at = 0;
  Shortage cause = kOnLaunch;
};

When later(When a, When b) { return b.at > a.at ? b : a; }

// Device memory for payloads, in bytes that become free at certain times; the first to be free is taken first.
class Room {
 public:
  explicit Room(int64_t num_bytes) : free_bytes_(num_bytes) {}

  // When the memory is there. What was promised beyond the room counts as there.
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

class Player {
 public:
  Player(const PlanProblem& problem, const Plan& plan, const Rates& rates, const StepShape& shape);

  // Plays one step; what it returns has everything but the step's length.
  SimulatedStep play_step();
  // When the launching thread knew the norm of the last step.
  double step_end() const { return launch_.at; }
  // What the next step follows from: when all that is under way ends, from step_end() on, and the memory in use.
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
  // Of updates that begin in backward, in the order in which the host makes them.
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
  // What a queue that is busy until `end` does next. Whoever waits for it waits for what held it up, where that takes
  // longer than the thing itself.
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

double collective_seconds(const Rates& rates, int64_t num_bytes, double gbps) {
  return rates.collective_latency_seconds + (gbps > 0 ? static_cast<double>(num_bytes) / (gbps * 1e9) : 0);
}

// What takes so long on a link that others use until `others_end`: two at once get half of it each.
double shared_seconds(double begin, double seconds, double others_end) {
  const double together = std::clamp(others_end - begin, 0.0, 2 * seconds);
  return seconds + together / 2;
}

int64_t tide(const PlanProblem& problem, size_t t) {
  return std::max(problem.timeline->moments[t].tide_peak_bytes, problem.least_tide_bytes);
}

// What payloads that are not fixed may take where the tide is lowest; the plan itself keeps to the tide.
int64_t largest_room(const PlanProblem& problem) {
  if (problem.limit_bytes == INT64_MAX) return INT64_MAX;
  int64_t lowest = INT64_MAX;
  for (size_t t = 0; t < problem.timeline->moments.size(); ++t) lowest = std::min(lowest, tide(problem, t));
  return std::max<int64_t>(problem.limit_bytes - problem.fixed_bytes - lowest, 0);
}

Player::Player(const PlanProblem& problem, const Plan& plan, const Rates& rates, const StepShape& shape)
    : problem_(problem),
      plan_(plan),
      rates_(rates),
      shape_(shape),
      arrays_(problem.arrays.size()),
      last_use_(problem.arrays.size(), 0),
      room_(largest_room(problem)) {
  for (size_t t = 0; t < problem.timeline->moments.size(); ++t) {
    for (const Access& access : problem.timeline->moments[t].accesses) {
      if (access.mode != AccessMode::kRetire) last_use_[static_cast<size_t>(access.array.index())] = t;
    }
  }
}

SimulatedStep Player::play_step() {
  step_ = {};
  postponed_.clear();
  activations_.clear();
  for (size_t t = 0; t < plan_.moments.size(); ++t) play_moment(t);
  finish_step();
  step_.compute_seconds += std::accumulate(shape_.compute_seconds.begin(), shape_.compute_seconds.end(), 0.0);
  return step_;
}

std::vector<double> Player::under_way() const {
  std::vector<double> result{compute_end_,    upload_end_.at, download_end_,  host_adam_end_,
                             gather_end_.at,  scatter_end_,   disk_read_end_, disk_adam_end_,
                             disk_write_end_, visit_up_end_,  visit_down_end_};
  result.insert(result.end(), sets_free_.begin(), sets_free_.end());
  result.insert(result.end(), visitors_end_.begin(), visitors_end_.end());
  for (const ArrayTimes& record : arrays_) {
    result.push_back(record.on_host_at.at);
    if (record.on_device) result.push_back(record.on_device_at.at);
  }
  // What is over does not matter.
  for (double& end : result) end = std::max(end - step_end(), 0.0);
  result.push_back(static_cast<double>(used_bytes_));
  return result;
}

// In the order of Pager::begin_moment, then what the moment computes, then GradientFlow::retire.
void Player::play_moment(size_t t) {
  const MomentPlan& planned = plan_.moments[t];
  const auto& accesses = problem_.timeline->moments[t].accesses;
  if (compute_end_ - rates_.launch_ahead_seconds > launch_.at)
    launch_ = {compute_end_ - rates_.launch_ahead_seconds, kOnLaunch};
  const bool begins_backward = problem_.timeline->moments[t].phase == Phase::kBackward &&
                               (t == 0 || problem_.timeline->moments[t - 1].phase == Phase::kForward);
  if (begins_backward) backward_begin_ = launch_.at;
  for (ArrayId id : planned.evict) evict(id.index());
  for (const Access& access : accesses) {
    if (access.mode != AccessMode::kRead) continue;
    if (is_sharded()) bring_postponed(access.array.index());
    bring(access.array.index());
  }
  for (ArrayId id : planned.evict_ahead) evict(id.index());
  prefetch(planned.prefetch);
  if (!shape_.activations.empty()) bring_activations(shape_.activations[t]);
  wait(launch_);
  for (const Access& access : accesses) {
    const int array = access.array.index();
    if (access.mode == AccessMode::kRetire) continue;
    if (access.mode == AccessMode::kWrite && !times(array).on_device) {
      const bool fetched = std::find(planned.fetch.begin(), planned.fetch.end(), access.array) != planned.fetch.end();
      if (fetched) {
        bring(array);
      } else {
        times(array).on_device = true;
        times(array).on_device_at = room_.take(cost(array).num_bytes);
        used_bytes_ += cost(array).num_bytes;
      }
    }
    wait(times(array).on_device_at);
  }
  step_.peak_bytes = std::max(step_.peak_bytes, used_bytes_ + problem_.fixed_bytes + tide(problem_, t));
  run(shape_.compute_seconds[t]);
  if (!shape_.activations.empty()) send_activations(shape_.activations[t]);
  for (const Access& access : accesses) {
    if (access.mode == AccessMode::kRetire) retire(access.array, t);
  }
}

// Into memory that the compute queue has used until now.
void Player::bring_activations(const ActivationCopies& copies) {
  if (copies.coming_bytes > 0) {
    const double seconds =
        rates_.transfer_latency_seconds + static_cast<double>(copies.coming_bytes) / (rates_.upload_gbps * 1e9);
    activations_.emplace_back(copies.coming_bytes, enqueue(upload_end_, {compute_end_, kOnUpload}, seconds, kOnUpload));
    step_.upload_seconds += seconds;
    step_.uploaded_bytes += copies.coming_bytes;
  }
  int64_t needed = copies.needed_bytes;
  while (needed > 0 && !activations_.empty()) {
    auto& [num_bytes, there] = activations_.front();
    wait(there);
    const int64_t part = std::min(needed, num_bytes);
    needed -= part;
    num_bytes -= part;
    if (num_bytes == 0) activations_.pop_front();
  }
}

void Player::send_activations(const ActivationCopies& copies) {
  if (copies.leaving_bytes == 0) return;
  const double seconds =
      rates_.transfer_latency_seconds + static_cast<double>(copies.leaving_bytes) / (rates_.download_gbps * 1e9);
  download_end_ = std::max(download_end_, compute_end_) + seconds;
  step_.download_seconds += seconds;
  step_.downloaded_bytes += copies.leaving_bytes;
}

void Player::retire(ArrayId id, size_t moment) {
  const int grad = id.index();
  const int param = ArrayId{id.chunk, ArrayKind::kParam}.index();
  const RecipeRow& recipe = this->recipe(id.chunk);
  const bool is_early = starts_in_backward(recipe);
  const bool is_dead = times(param).on_device && last_use_[static_cast<size_t>(param)] <= moment;
  if (is_visit(recipe) && times(grad).on_device) {
    const double used = visit(id.chunk, is_sharded() ? scatter(grad) : compute_end_);
    if (is_dead) release(param, is_sharded() ? compute_end_ : used);
    release(grad, used);
    return;
  }
  if (is_dead) release(param, compute_end_);
  if (!times(grad).on_device) return;
  const int64_t num_bytes = cost(grad).retire_bytes;
  const bool is_whole = is_early && recipe.states == Tier::kHost && recipe.passes == Passes::kOne;
  if (is_whole) await_gradient_room(num_bytes);
  if (is_sharded()) {
    const double mean_at = scatter(grad);
    release(grad, mean_at);
    if (num_bytes > 0) download(grad, num_bytes, std::max(mean_at, launch_.at));
  } else {
    release(grad, num_bytes > 0 ? download(grad, num_bytes, launch_.at) : compute_end_);
  }
  const double ready = times(grad).on_host_at.at;
  if (is_early && recipe.states == Tier::kHost) {
    early_updates_.push_back({id.chunk, ready, is_whole ? num_bytes : 0});
    waiting_gradient_bytes_ += early_updates_.back().gradient_bytes;
  }
  if (is_early && recipe.states == Tier::kDisk) update_through_disk(id.chunk, ready);
}

// The norm, then Updates::apply: values that were updated on the host are not on the device any more.
void Player::finish_step() {
  wait({scatter_end_, kOnCollective});
  launch_ = {std::max(launch_.at, compute_end_) + rates_.synchronize_seconds, kOnLaunch};
  update_in_order_of_need();
  const auto num_chunks = static_cast<ChunkId>(shape_.updates.size());
  for (ChunkId chunk = 0; chunk < num_chunks; ++chunk) update(chunk);
  // States behind parameters, in the order in which the next backward needs them.
  for (ChunkId chunk = num_chunks - 1; chunk >= 0; --chunk) {
    if (recipe(chunk).passes == Passes::kTwo) run_host_adam(chunk, launch_.at, rates_.states_pass);
  }
  for (int array = 0; array < static_cast<int>(arrays_.size()); ++array) {
    if (times(array).on_device && !cost(array).survives_step) release(array, compute_end_);
  }
}

void Player::update(ChunkId chunk) {
  const RecipeRow& recipe = this->recipe(chunk);
  if (recipe.start == Start::kNever) return;
  const int grad = ArrayId{chunk, ArrayKind::kGrad}.index();
  const int param = ArrayId{chunk, ArrayKind::kParam}.index();
  if (recipe.states != Tier::kDevice) {
    if (recipe.start != Start::kAfterNorm) return;
    if (times(grad).on_device) release(grad, download(grad, cost(grad).retire_bytes));
    const double begin = std::max(launch_.at, times(grad).on_host_at.at);
    recipe.states == Tier::kHost ? update_on_host(chunk, begin) : update_through_disk(chunk, begin);
  } else {
    wait(launch_);
    const bool comes_back = std::exchange(times(grad).has_left, false) && !times(grad).on_device;
    if (comes_back) {
      make_room(cost(grad).num_bytes);
      bring(grad);
      wait(times(grad).on_device_at);
    }
    const double seconds = static_cast<double>(numel(chunk)) / rates_.device_adam_params_per_second;
    step_.device_adam_seconds += seconds;
    run(seconds);
    // The new parameter takes the gradient's place, unless it has one for good, or others need that.
    if (times(param).on_device) release(param, compute_end_);
    if (comes_back) {
      release(grad, compute_end_);
    } else if (times(grad).on_device && cost(param).num_bytes > 0) {
      times(grad).on_device = false;
      times(param) = {true, {compute_end_, kOnMemory}, {}};
    }
  }
}

// Between two steps, beside what activations have left. Values that the next step needs last leave first.
void Player::make_room(int64_t num_bytes) {
  if (problem_.limit_bytes == INT64_MAX) return;
  const int64_t most =
      problem_.limit_bytes - problem_.fixed_bytes - tide(problem_, plan_.moments.size() - 1) - num_bytes;
  for (auto chunk = static_cast<ChunkId>(shape_.updates.size()); chunk-- > 0 && used_bytes_ > most;) {
    const int param = ArrayId{chunk, ArrayKind::kParam}.index();
    const bool is_copy = recipe(chunk).states != Tier::kDevice;
    if (is_copy && times(param).on_device) release(param, compute_end_);
  }
}

void Player::run_host_adam(ChunkId chunk, double begin, double share) {
  const double seconds = share * static_cast<double>(numel(chunk)) / rates_.host_adam_params_per_second;
  host_adam_end_ = std::max(host_adam_end_, begin) + seconds;
  step_.host_adam_seconds += seconds;
}

void Player::update_on_host(ChunkId chunk, double begin) {
  run_host_adam(chunk, begin, recipe(chunk).passes == Passes::kOne ? 1 : rates_.param_pass);
  ArrayTimes& param = times(ArrayId{chunk, ArrayKind::kParam}.index());
  param.on_host_at = {host_adam_end_, kOnHostUpdate};
  param.is_visitor = false;
}

double Player::visit(ChunkId chunk, double begin) {
  ArrayTimes& param = times(ArrayId{chunk, ArrayKind::kParam}.index());
  const VisitCost& costs = problem_.visits[static_cast<size_t>(chunk)];
  const int64_t up_bytes = costs.up_bytes - (param.on_device ? costs.value_bytes : 0);
  const int64_t down_bytes = costs.down_bytes;
  const double up = static_cast<double>(up_bytes) / (rates_.upload_gbps * 1e9);
  const double down = static_cast<double>(down_bytes) / (rates_.download_gbps * 1e9);
  begin = std::max({begin, visit_up_end_, visitors_end_.front()});
  visit_up_end_ = begin + shared_seconds(begin, up, upload_end_.at);
  visit_up_end_ += static_cast<double>(numel(chunk)) / rates_.device_adam_params_per_second;
  begin = std::max(visit_down_end_, visit_up_end_);
  visit_down_end_ = begin + shared_seconds(begin, down, download_end_);
  std::rotate(visitors_end_.begin(), visitors_end_.begin() + 1, visitors_end_.end());
  visitors_end_.back() = visit_down_end_;
  step_.visit_seconds += std::max(up, down);
  step_.uploaded_bytes += up_bytes;
  step_.downloaded_bytes += down_bytes;
  param.on_host_at = {visit_down_end_, kOnHostUpdate};
  param.is_visitor = true;
  return visit_down_end_;
}

// [Note: the order of need]: of those whose gradients are there the one that the next forward needs first, where none
// is the one that comes first.
void Player::update_most_needed() {
  const double now = std::max(host_adam_end_, early_updates_.front().ready);
  const auto end = std::find_if(early_updates_.begin(), early_updates_.end(),
                                [now](const EarlyUpdate& update) { return update.ready > now; });
  const auto most_needed = std::min_element(
      early_updates_.begin(), end, [](const EarlyUpdate& a, const EarlyUpdate& b) { return a.chunk < b.chunk; });
  update_on_host(most_needed->chunk, most_needed->ready);
  waiting_gradient_bytes_ -= most_needed->gradient_bytes;
  early_updates_.erase(most_needed);
}

void Player::update_in_order_of_need() {
  while (!early_updates_.empty()) update_most_needed();
}

void Player::await_gradient_room(int64_t num_bytes) {
  while (waiting_gradient_bytes_ > problem_.gradient_room_bytes - num_bytes && !early_updates_.empty()) {
    update_most_needed();
    launch_ = later(launch_, {host_adam_end_, kOnHostUpdate});
  }
}

void Player::update_through_disk(ChunkId chunk, double begin) {
  const int64_t num_bytes = shape_.disk_bytes[static_cast<size_t>(chunk)];
  const double read_seconds = static_cast<double>(num_bytes) / (rates_.disk_read_gbps * 1e9);
  const double write_seconds = static_cast<double>(num_bytes) / (rates_.disk_write_gbps * 1e9);
  const double adam_seconds = static_cast<double>(numel(chunk)) / rates_.host_adam_params_per_second;
  disk_read_end_ = std::max({disk_read_end_, backward_begin_, sets_free_.front()}) + read_seconds;
  disk_adam_end_ = std::max({disk_adam_end_, disk_read_end_, begin}) + adam_seconds;
  disk_write_end_ = std::max(disk_write_end_, disk_adam_end_) + write_seconds;
  std::rotate(sets_free_.begin(), sets_free_.begin() + 1, sets_free_.end());
  sets_free_.back() = disk_write_end_;
  step_.host_adam_seconds += adam_seconds;
  step_.disk_read_seconds += read_seconds;
  step_.disk_write_seconds += write_seconds;
  step_.disk_read_bytes += num_bytes;
  step_.disk_written_bytes += num_bytes;
  times(ArrayId{chunk, ArrayKind::kParam}.index()).on_host_at = {disk_adam_end_, kOnHostUpdate};
}

// Pager::settle_planned: one whose value is still being made holds back those after it until the next moment.
void Player::prefetch(const std::vector<ArrayId>& arrays) {
  for (ArrayId id : arrays) postponed_.push_back(id.index());
  const auto is_made = [this](const ArrayTimes& array) {
    return array.is_visitor || array.on_host_at.at <= launch_.at;
  };
  while (!postponed_.empty() && is_made(times(postponed_.front()))) {
    bring(postponed_.front());
    postponed_.pop_front();
  }
}

// Pager::gather_in_turn: what was put off comes before what is needed now, since all ranks gather in one order.
void Player::bring_postponed(int last) {
  while (!postponed_.empty() && !times(last).on_device) {
    bring(postponed_.front());
    postponed_.pop_front();
  }
}

void Player::bring(int array) {
  if (times(array).on_device) return;
  // The launching thread itself waits for updates on the host.
  if (!times(array).is_visitor) launch_ = later(launch_, times(array).on_host_at);
  const When memory = room_.take(cost(array).num_bytes);
  used_bytes_ += cost(array).num_bytes;
  times(array).on_device = true;
  const bool whole = is_sharded() && ArrayId::from_index(array).kind == ArrayKind::kParam;
  if (cost(array).fetch_bytes > 0) {
    upload(array, later(later(launch_, memory), times(array).on_host_at));
  } else if (whole) {
    wait(later(launch_, memory));  // the compute queue casts this rank's shard into its place
    times(array).on_device_at = {compute_end_, kOnCollective};
  } else if (const double seconds = dequantize_seconds(array); seconds > 0) {
    wait(later(launch_, memory));  // codes that are on the device throughout
    run(seconds);
    step_.compute_seconds += seconds;
    times(array).on_device_at = {compute_end_, kOnUpload};
  } else {
    times(array).on_device_at = memory;
  }
  if (whole) gather(array, times(array).on_device_at);
}

When Player::enqueue(When& end, When begin, double seconds, Shortage cause) const {
  const bool held_up = begin.at - std::max(end.at, compute_end_) > seconds;
  end = {later(end, begin).at + seconds, held_up ? begin.cause : cause};
  return end;
}

double Player::dequantize_seconds(int array) const {
  const ArrayId id = ArrayId::from_index(array);
  if (id.kind != ArrayKind::kParam || shape_.dequantized_bytes.empty()) return 0;
  const auto num_bytes = static_cast<double>(shape_.dequantized_bytes[static_cast<size_t>(id.chunk)]);
  return num_bytes == 0 ? 0 : num_bytes / (rates_.device_memory_gbps * 1e9);
}

// Codes are dequantised on the queue on which they come.
void Player::upload(int array, When begin) {
  const double transfer_seconds =
      rates_.transfer_latency_seconds + static_cast<double>(cost(array).fetch_bytes) / (rates_.upload_gbps * 1e9);
  const double begins = std::max(upload_end_.at, begin.at);
  const double seconds = shared_seconds(begins, transfer_seconds, visit_up_end_) + dequantize_seconds(array);
  times(array).on_device_at = enqueue(upload_end_, begin, seconds, kOnUpload);
  step_.upload_seconds += seconds;
  step_.uploaded_bytes += cost(array).fetch_bytes;
}

void Player::gather(int array, When begin) {
  const double seconds = collective_seconds(rates_, others_bytes(array), rates_.gather_gbps);
  times(array).on_device_at = enqueue(gather_end_, begin, seconds, kOnCollective);
  step_.gather_seconds += seconds;
  step_.gathered_bytes += others_bytes(array);
}

// Returns when this rank has its share of the mean.
double Player::scatter(int array) {
  const double seconds = collective_seconds(rates_, others_bytes(array), rates_.scatter_gbps);
  scatter_end_ = std::max(scatter_end_, compute_end_) + seconds;
  step_.scatter_seconds += seconds;
  step_.scattered_bytes += others_bytes(array);
  return scatter_end_;
}

double Player::download(int array, int64_t num_bytes, double ready) {
  const double seconds =
      rates_.transfer_latency_seconds + static_cast<double>(num_bytes) / (rates_.download_gbps * 1e9);
  const double begin = std::max({download_end_, compute_end_, ready});
  download_end_ = begin + shared_seconds(begin, seconds, visit_down_end_);
  times(array).on_host_at = {download_end_, kOnMemory};
  step_.download_seconds += seconds;
  step_.downloaded_bytes += num_bytes;
  return download_end_;
}

void Player::evict(int array) {
  if (!times(array).on_device) return;
  times(array).has_left = true;
  release(array, cost(array).evict_bytes > 0 ? download(array, cost(array).evict_bytes) : compute_end_);
}

void Player::release(int array, double at) {
  ArrayTimes& record = times(array);
  record.on_device = false;
  used_bytes_ -= cost(array).num_bytes;
  room_.give(std::max(at, record.on_device_at.at), cost(array).num_bytes);
}

void Player::wait(When when) {
  if (when.at <= compute_end_) return;
  step_.stall_seconds[when.cause] += when.at - compute_end_;
  compute_end_ = when.at;
}

bool are_same(const std::vector<double>& before, const std::vector<double>& now) {
  return std::equal(before.begin(), before.end(), now.begin(), now.end(),
                    [](double a, double b) { return std::abs(a - b) < kSameSeconds; });
}

void check(const PlanProblem& problem, const Plan& plan, const Rates& rates, const StepShape& shape) {
  const size_t num_moments = problem.timeline->moments.size();
  PS_CHECK(plan.moments.size() == num_moments && shape.compute_seconds.size() == num_moments, ArgumentError,
           "the timeline has ", num_moments, " moments, the plan ", plan.moments.size(), " and the times ",
           shape.compute_seconds.size(), "; give one of each per moment");
  PS_CHECK(shape.activations.empty() || shape.activations.size() == num_moments, ArgumentError, "the timeline has ",
           num_moments, " moments and activations are copied in ", shape.activations.size(),
           "; give one of each per moment");
  PS_CHECK(
      shape.updates.size() == shape.numels.size() && shape.updates.size() * kNumArrayKinds == problem.arrays.size(),
      ArgumentError, shape.updates.size(), " updates and ", shape.numels.size(), " sizes for ",
      problem.arrays.size() / kNumArrayKinds, " chunks; give one of each per chunk");
  const bool any_visits =
      std::any_of(shape.updates.begin(), shape.updates.end(), [](Recipe recipe) { return is_visit(row_of(recipe)); });
  PS_CHECK(!any_visits || problem.visits.size() == shape.updates.size(), ArgumentError,
           "chunks visit the device, and what that moves is known of ", problem.visits.size(), " of ",
           shape.updates.size(), "; give one of each per chunk");
  PS_CHECK(rates.upload_gbps > 0 && rates.download_gbps > 0 && rates.host_adam_params_per_second > 0 &&
               rates.device_adam_params_per_second > 0,
           ArgumentError, "a rate is not positive: upload ", rates.upload_gbps, " GB/s, download ", rates.download_gbps,
           " GB/s, Adam ", rates.host_adam_params_per_second, " (host) and ", rates.device_adam_params_per_second,
           " (device) parameters per second");
  PS_CHECK(rates.param_pass > 0 && rates.states_pass > 0, ArgumentError, "passes over parameters and over states take ",
           rates.param_pass, " and ", rates.states_pass, " of an update in one pass; give more than 0");
  const bool any_on_disk = std::any_of(shape.updates.begin(), shape.updates.end(),
                                       [](Recipe recipe) { return row_of(recipe).states == Tier::kDisk; });
  PS_CHECK(!any_on_disk || (shape.disk_bytes.size() == shape.updates.size() && rates.disk_read_gbps > 0 &&
                            rates.disk_write_gbps > 0),
           ArgumentError, "states are on the disk, which reads ", rates.disk_read_gbps, " GB/s and writes ",
           rates.disk_write_gbps, " GB/s, and their bytes are known of ", shape.disk_bytes.size(),
           " chunks; give positive rates and the bytes of each chunk");
  const bool any_quantized = std::any_of(shape.dequantized_bytes.begin(), shape.dequantized_bytes.end(),
                                         [](int64_t num_bytes) { return num_bytes > 0; });
  PS_CHECK(shape.dequantized_bytes.empty() || shape.dequantized_bytes.size() == shape.updates.size(), ArgumentError,
           "bytes that are dequantised are known of ", shape.dequantized_bytes.size(), " chunks of ",
           shape.updates.size(), "; give those of each chunk, or none");
  PS_CHECK(!any_quantized || rates.device_memory_gbps > 0, ArgumentError,
           "chunks are dequantised by memory that moves ", rates.device_memory_gbps, " GB/s; give a positive rate");
  PS_CHECK(shape.num_ranks >= 1 && rates.gather_gbps >= 0 && rates.scatter_gbps >= 0, ArgumentError, "gathers at ",
           rates.gather_gbps, " GB/s and scatters at ", rates.scatter_gbps, " GB/s between ", shape.num_ranks,
           " ranks: give at least one rank and no negative rate");
}

}  // namespace

void describe_updates(const Layout& layout, StepShape& shape) {
  shape.num_ranks = layout.sharding().num_ranks;
  shape.numels.clear();
  shape.disk_bytes.clear();
  for (const ChunkSpec& chunk : layout.chunks()) {
    shape.numels.push_back(chunk.shard_numel);
    shape.disk_bytes.push_back(disk_bytes(chunk));
  }
}

SimulatedStep simulate(const PlanProblem& problem, const Plan& plan, const Rates& rates, const StepShape& shape) {
  check(problem, plan, rates, shape);
  Player player(problem, plan, rates, shape);
  constexpr int kAveraged = kSteps / 2;
  SimulatedStep mean;
  double begin = 0;
  std::vector<double> before;
  for (int index = 0; index < kSteps; ++index) {
    if (index == kSteps - kAveraged) begin = player.step_end();
    const double step_begin = player.step_end();
    SimulatedStep step = player.play_step();
    const std::vector<double> now = player.under_way();
    if (are_same(before, now)) {
      step.seconds = player.step_end() - step_begin;
      return step;
    }
    before = now;
    if (index < kSteps - kAveraged) continue;
    std::array<double, kNumShortages> stalls = mean.stall_seconds;
    for (size_t cause = 0; cause < stalls.size(); ++cause) stalls[cause] += step.stall_seconds[cause] / kAveraged;
    const int64_t peak_bytes = std::max(mean.peak_bytes, step.peak_bytes);
    mean = step;
    mean.stall_seconds = stalls;
    mean.peak_bytes = peak_bytes;
  }
  mean.seconds = (player.step_end() - begin) / kAveraged;
  return mean;
}

}  // namespace patrickstar
