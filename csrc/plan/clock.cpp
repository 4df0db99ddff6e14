#include "plan/clock.h"

#include <algorithm>
#include <numeric>

namespace patrickstar {

namespace {

double collective_seconds(const Rates& rates, int64_t num_bytes, double gbps) {
  return rates.collective_latency_seconds + (gbps > 0 ? static_cast<double>(num_bytes) / (gbps * 1e9) : 0);
}

// Room of payloads that are not fixed where the tide is lowest; the plan itself keeps to the tide.
int64_t largest_room(const PlanProblem& problem) {
  if (problem.limit_bytes == INT64_MAX) return INT64_MAX;
  int64_t lowest = INT64_MAX;
  for (size_t t = 0; t < problem.timeline->moments.size(); ++t) lowest = std::min(lowest, tide(problem, t));
  return std::max<int64_t>(problem.limit_bytes - problem.fixed_bytes - lowest, 0);
}

}  // namespace

double shared_seconds(double begin, double seconds, double others_end) {
  const double together = std::clamp(others_end - begin, 0.0, 2 * seconds);
  return seconds + together / 2;
}

int64_t tide(const PlanProblem& problem, size_t t) {
  return std::max(problem.timeline->moments[t].tide_peak_bytes, problem.least_tide_bytes);
}

Clock::Clock(const PlanProblem& problem, const Plan& plan, const Rates& rates, const StepShape& shape)
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

SimulatedStep Clock::play_step() {
  step_ = {};
  postponed_.clear();
  activations_.clear();
  for (size_t t = 0; t < plan_.moments.size(); ++t) play_moment(t);
  finish_step();
  step_.compute_seconds += std::accumulate(shape_.compute_seconds.begin(), shape_.compute_seconds.end(), 0.0);
  return step_;
}

std::vector<double> Clock::under_way() const {
  std::vector<double> result{compute_end_,    upload_end_.at, download_end_,  host_adam_end_,
                             gather_end_.at,  scatter_end_,   disk_read_end_, disk_adam_end_,
                             disk_write_end_, visit_up_end_,  visit_down_end_};
  result.insert(result.end(), sets_free_.begin(), sets_free_.end());
  result.insert(result.end(), visitors_end_.begin(), visitors_end_.end());
  for (const ArrayTimes& record : arrays_) {
    result.push_back(record.on_host_at.at);
    if (record.on_device) result.push_back(record.on_device_at.at);
  }
  // Times that have passed are all the same to the next step.
  for (double& end : result) end = std::max(end - step_end(), 0.0);
  result.push_back(static_cast<double>(used_bytes_));
  return result;
}

// In the order of Pager::begin_moment, then what the moment computes, then GradientFlow::retire.
void Clock::play_moment(size_t t) {
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
void Clock::bring_activations(const ActivationCopies& copies) {
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

void Clock::send_activations(const ActivationCopies& copies) {
  if (copies.leaving_bytes == 0) return;
  const double seconds =
      rates_.transfer_latency_seconds + static_cast<double>(copies.leaving_bytes) / (rates_.download_gbps * 1e9);
  download_end_ = std::max(download_end_, compute_end_) + seconds;
  step_.download_seconds += seconds;
  step_.downloaded_bytes += copies.leaving_bytes;
}

// Pager::settle_planned: one whose value is still being made holds back those after it until the next moment.
void Clock::prefetch(const std::vector<ArrayId>& arrays) {
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
void Clock::bring_postponed(int last) {
  while (!postponed_.empty() && !times(last).on_device) {
    bring(postponed_.front());
    postponed_.pop_front();
  }
}

void Clock::bring(int array) {
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

When Clock::enqueue(When& end, When begin, double seconds, Shortage cause) const {
  const bool held_up = begin.at - std::max(end.at, compute_end_) > seconds;
  end = {later(end, begin).at + seconds, held_up ? begin.cause : cause};
  return end;
}

double Clock::dequantize_seconds(int array) const {
  const ArrayId id = ArrayId::from_index(array);
  if (id.kind != ArrayKind::kParam || shape_.dequantized_bytes.empty()) return 0;
  const auto num_bytes = static_cast<double>(shape_.dequantized_bytes[static_cast<size_t>(id.chunk)]);
  return num_bytes == 0 ? 0 : num_bytes / (rates_.device_memory_gbps * 1e9);
}

// Codes are dequantised on the queue on which they come.
void Clock::upload(int array, When begin) {
  const double transfer_seconds =
      rates_.transfer_latency_seconds + static_cast<double>(cost(array).fetch_bytes) / (rates_.upload_gbps * 1e9);
  const double begins = std::max(upload_end_.at, begin.at);
  const double seconds = shared_seconds(begins, transfer_seconds, visit_up_end_) + dequantize_seconds(array);
  times(array).on_device_at = enqueue(upload_end_, begin, seconds, kOnUpload);
  step_.upload_seconds += seconds;
  step_.uploaded_bytes += cost(array).fetch_bytes;
}

void Clock::gather(int array, When begin) {
  const double seconds = collective_seconds(rates_, others_bytes(array), rates_.gather_gbps);
  times(array).on_device_at = enqueue(gather_end_, begin, seconds, kOnCollective);
  step_.gather_seconds += seconds;
  step_.gathered_bytes += others_bytes(array);
}

// Returns when this rank has its share of the mean.
double Clock::scatter(int array) {
  const double seconds = collective_seconds(rates_, others_bytes(array), rates_.scatter_gbps);
  scatter_end_ = std::max(scatter_end_, compute_end_) + seconds;
  step_.scatter_seconds += seconds;
  step_.scattered_bytes += others_bytes(array);
  return scatter_end_;
}

double Clock::download(int array, int64_t num_bytes, double ready) {
  const double seconds =
      rates_.transfer_latency_seconds + static_cast<double>(num_bytes) / (rates_.download_gbps * 1e9);
  const double begin = std::max({download_end_, compute_end_, ready});
  download_end_ = begin + shared_seconds(begin, seconds, visit_down_end_);
  times(array).on_host_at = {download_end_, kOnMemory};
  step_.download_seconds += seconds;
  step_.downloaded_bytes += num_bytes;
  return download_end_;
}

void Clock::evict(int array) {
  if (!times(array).on_device) return;
  times(array).has_left = true;
  release(array, cost(array).evict_bytes > 0 ? download(array, cost(array).evict_bytes) : compute_end_);
}

void Clock::release(int array, double at) {
  ArrayTimes& record = times(array);
  record.on_device = false;
  used_bytes_ -= cost(array).num_bytes;
  room_.give(std::max(at, record.on_device_at.at), cost(array).num_bytes);
}

void Clock::wait(When when) {
  if (when.at <= compute_end_) return;
  step_.stall_seconds[when.cause] += when.at - compute_end_;
  compute_end_ = when.at;
}

}  // namespace patrickstar
