#include "plan/clock.h"

#include <algorithm>
#include <numeric>

namespace patrickstar {

namespace {

double collective_seconds(const Rates& rates, int64_t num_bytes, double gbps) {
  return rates.collective_latency_seconds + (gbps > 0 ? static_cast<double>(num_bytes) / (gbps * 1e9) : 0);
}

bool is_param(int array) { return ArrayId::from_index(array).kind == ArrayKind::kParam; }

// Room of chunk buffers at the lowest activation memory; the plan itself keeps to each access's room.
int64_t largest_room(const PlanProblem& problem) {
  if (problem.limit_bytes == INT64_MAX) return INT64_MAX;
  int64_t lowest = INT64_MAX;
  for (size_t t = 0; t < problem.timeline->accesses.size(); ++t)
    lowest = std::min(lowest, activation_memory(problem, t));
  return std::max<int64_t>(problem.limit_bytes - problem.fixed_bytes - lowest, 0);
}

}  // namespace

double shared_seconds(double begin, double seconds, double others_end) {
  const double together = std::clamp(others_end - begin, 0.0, 2 * seconds);
  return seconds + together / 2;
}

Clock::Clock(const PlanProblem& problem, const Program& program, const Rates& rates, const StepShape& shape)
    : problem_(problem),
      program_(program),
      rates_(rates),
      shape_(shape),
      arrays_(problem.arrays.size()),
      spans_(program.instructions.size()),
      room_(largest_room(problem)) {
  for (int array : program.resident) allocate(array);
}

SimulatedStep Clock::play_step() {
  step_ = {};
  step_begin_ = launch_.at;
  postponed_.clear();
  activations_.clear();
  for (size_t index = 0; index < program_.instructions.size(); ++index) {
    const bool waits = at(index).issue == Issue::kAhead && row_of(at(index).op).operand == Operand::kArray;
    waits ? postponed_.push_back(index) : issue(index);
  }
  step_.compute_seconds += std::accumulate(shape_.compute_seconds.begin(), shape_.compute_seconds.end(), 0.0);
  return step_;
}

std::vector<double> Clock::under_way() const {
  std::vector<double> result{compute_end_,    upload_end_.at,     download_end_,       host_adam_end_,
                             gather_end_.at,  scatter_end_,       disk_read_end_,      disk_adam_end_,
                             disk_write_end_, round_trip_up_end_, round_trip_down_end_};
  result.insert(result.end(), sets_free_.begin(), sets_free_.end());
  result.insert(result.end(), round_trip_buffers_end_.begin(), round_trip_buffers_end_.end());
  for (const ArrayTimes& record : arrays_) {
    result.push_back(record.on_host_at.at);
    if (record.on_device) result.push_back(record.on_device_at.at);
  }
  // Times in the past make no difference to the next step.
  for (double& end : result) end = std::max(end - step_end(), 0.0);
  result.push_back(static_cast<double>(used_bytes_));
  return result;
}

void Clock::issue(size_t index) {
  const Instruction& instruction = at(index);
  if (instruction.issue == Issue::kAhead && row_of(instruction.op).operand == Operand::kChunk) {
    const ChunkId chunk = instruction.operand;
    const int grad = ArrayId{chunk, ArrayKind::kGrad}.index();
    const int64_t gradient_bytes = instruction.op == Op::kUpdateHost ? cost(grad).finalise_bytes : 0;
    early_updates_.push_back({index, chunk, times(grad).on_host_at.at, gradient_bytes});
    waiting_gradient_bytes_ += gradient_bytes;
  } else {
    spans_[index] = run(instruction);
  }
}

Busy Clock::run(const Instruction& instruction) {
  const int operand = instruction.operand;
  const auto access = static_cast<size_t>(operand);
  switch (instruction.op) {
    case Op::kBegin:
      return begin_access(access);
    case Op::kRecall:
      return recall(shape_.activations[access]);
    case Op::kCompute:
      return compute(access);
    case Op::kOffload:
      return offload(shape_.activations[access]);
    case Op::kAllocate:
      // All ranks all-gather in one order (Pager::gather_in_turn), so postponed fetches go before this one.
      if (instruction.issue == Issue::kNow && is_param(operand) && is_sharded(operand)) await(operand);
      return allocate(operand);
    case Op::kFetch:
      return fetch(operand);
    case Op::kCast:
      return cast(operand);
    case Op::kDequantize:
      return dequantize(operand);
    case Op::kGather:
      return gather(operand);
    case Op::kAwait:
      await(operand);
      break;
    case Op::kEvict:
      return is_postponed(operand) ? Busy{launch_.at, launch_.at} : download(operand, cost(operand).evict_bytes, 0);
    case Op::kScatter:
      return scatter(operand);
    case Op::kAwaitRoom:
      await_gradient_room(cost(operand).finalise_bytes);
      break;
    case Op::kToHost:
      return download(operand, cost(operand).finalise_bytes, std::max(times(operand).busy_until, launch_.at));
    case Op::kInherit:
      return inherit(operand);
    case Op::kFree:
      return free(operand);
    case Op::kNorm:
      return norm();
    case Op::kUpdateHost:
      return update_on_host(operand, std::max(launch_.at, grad(operand).on_host_at.at), 1);
    case Op::kUpdateHostParam:
      return update_on_host(operand, std::max(launch_.at, grad(operand).on_host_at.at), rates_.param_pass);
    case Op::kUpdateHostStates:
      return run_host_adam(operand, launch_.at, rates_.states_pass);
    case Op::kUpdateDevice:
      return update_on_device(operand);
    case Op::kLoad:
      return load(operand);
    case Op::kUpdateDisk:
      return update_from_disk(operand);
    case Op::kStore:
      return store(operand);
    case Op::kRoundTripUp:
      return round_trip_up(operand);
    case Op::kRoundTripDown:
      return round_trip_down(operand);
  }
  return {launch_.at, launch_.at};
}

Busy Clock::begin_access(size_t t) {
  if (compute_end_ - rates_.launch_ahead_seconds > launch_.at)
    launch_ = {compute_end_ - rates_.launch_ahead_seconds, kOnLaunch};
  const std::vector<Access>& accesses = problem_.timeline->accesses;
  const bool begins_backward =
      accesses[t].phase == Phase::kBackward && (t == 0 || accesses[t - 1].phase == Phase::kForward);
  if (begins_backward) backward_begin_ = launch_.at;
  return {launch_.at, launch_.at};
}

Busy Clock::compute(size_t t) {
  issue_postponed();
  wait(launch_);
  for (const ArrayUse& use : problem_.timeline->accesses[t].uses) {
    if (use.mode != ArrayUseMode::kFinalise) wait(times(use.array.index()).on_device_at);
  }
  step_.peak_bytes = std::max(step_.peak_bytes, used_bytes_ + problem_.fixed_bytes + activation_memory(problem_, t));
  compute_end_ += shape_.compute_seconds[t];
  return {compute_end_ - shape_.compute_seconds[t], compute_end_};
}

// The destination was last used by the compute queue, so the copy waits for it.
Busy Clock::recall(const ActivationCopies& copies) {
  issue_postponed();
  Busy busy{launch_.at, launch_.at};
  if (copies.coming_bytes > 0) {
    const double seconds = transfer_seconds(copies.coming_bytes, rates_.upload_gbps);
    busy = enqueue(upload_end_, {compute_end_, kOnUpload}, seconds, kOnUpload);
    activations_.emplace_back(copies.coming_bytes, upload_end_);
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
  return busy;
}

Busy Clock::offload(const ActivationCopies& copies) {
  const double seconds = transfer_seconds(copies.leaving_bytes, rates_.download_gbps);
  const double begin = std::max(download_end_, compute_end_);
  download_end_ = begin + seconds;
  step_.download_seconds += seconds;
  step_.downloaded_bytes += copies.leaving_bytes;
  return {begin, download_end_};
}

// Like Pager::settle_planned: a fetch whose value is not made yet holds back the fetches after it.
void Clock::issue_postponed() {
  const auto is_made = [this](const ArrayTimes& array) {
    return array.is_round_trip_buffer || array.on_host_at.at <= launch_.at;
  };
  while (!postponed_.empty() && is_made(times(at(postponed_.front()).operand))) {
    issue(postponed_.front());
    postponed_.pop_front();
  }
}

bool Clock::is_postponed(int array) const {
  return std::any_of(postponed_.begin(), postponed_.end(), [&](size_t index) { return at(index).operand == array; });
}

void Clock::await(int array) {
  const auto is_own = [&](size_t index) { return at(index).operand == array; };
  const auto last = std::find_if(postponed_.rbegin(), postponed_.rend(), is_own).base();
  if (last == postponed_.begin() && times(array).on_device) return;
  const auto end = last == postponed_.begin() ? postponed_.end() : last;
  const auto is_due = [&](size_t index) {
    return is_own(index) || (is_sharded(array) && is_sharded(at(index).operand));
  };
  std::deque<size_t> left;
  for (auto index = postponed_.begin(); index != end; ++index) {
    is_due(*index) ? issue(*index) : left.push_back(*index);
  }
  left.insert(left.end(), end, postponed_.end());
  postponed_ = std::move(left);
}

void Clock::forget_postponed(int array) {
  const auto is_own = [&](size_t index) { return at(index).operand == array; };
  postponed_.erase(std::remove_if(postponed_.begin(), postponed_.end(), is_own), postponed_.end());
}

Busy Clock::allocate(int array) {
  times(array).on_device = true;
  times(array).busy_until = 0;
  times(array).on_device_at = room_.take(cost(array).num_bytes);
  used_bytes_ += cost(array).num_bytes;
  return {launch_.at, launch_.at};
}

// The launching thread waits for host updates. Dequantisation runs on the upload queue.
Busy Clock::fetch(int array) {
  ArrayTimes& record = times(array);
  if (!record.is_round_trip_buffer) launch_ = later(launch_, record.on_host_at);
  const When begin = later(later(launch_, record.on_device_at), record.on_host_at);
  const double alone = transfer_seconds(cost(array).fetch_bytes, rates_.upload_gbps);
  const double begins = std::max(upload_end_.at, begin.at);
  const double seconds = shared_seconds(begins, alone, round_trip_up_end_) + dequantize_seconds(array);
  const Busy busy = enqueue(upload_end_, begin, seconds, kOnUpload);
  record.on_device_at = upload_end_;
  step_.upload_seconds += seconds;
  step_.uploaded_bytes += cost(array).fetch_bytes;
  return busy;
}

// The compute queue casts this rank's shard into its place in the whole array.
Busy Clock::cast(int array) {
  ArrayTimes& record = times(array);
  if (!record.is_round_trip_buffer) launch_ = later(launch_, record.on_host_at);
  wait(later(launch_, record.on_device_at));
  record.on_device_at = {compute_end_, kOnCollective};
  return {compute_end_, compute_end_};
}

Busy Clock::dequantize(int array) {
  const double seconds = dequantize_seconds(array);
  wait(later(launch_, times(array).on_device_at));
  compute_end_ += seconds;
  step_.compute_seconds += seconds;
  times(array).on_device_at = {compute_end_, kOnUpload};
  return {compute_end_ - seconds, compute_end_};
}

Busy Clock::gather(int array) {
  const int64_t num_bytes = others_bytes(cost(array), shape_.ranks_of(ArrayId::from_index(array).chunk));
  const double seconds = collective_seconds(rates_, num_bytes, rates_.gather_gbps);
  const Busy busy = enqueue(gather_end_, times(array).on_device_at, seconds, kOnCollective);
  times(array).on_device_at = gather_end_;
  step_.gather_seconds += seconds;
  step_.gathered_bytes += num_bytes;
  return busy;
}

Busy Clock::scatter(int array) {
  const int64_t num_bytes = others_bytes(cost(array), shape_.ranks_of(ArrayId::from_index(array).chunk));
  const double seconds = collective_seconds(rates_, num_bytes, rates_.scatter_gbps);
  const double begin = std::max(scatter_end_, compute_end_);
  scatter_end_ = begin + seconds;
  times(array).busy_until = scatter_end_;
  step_.scatter_seconds += seconds;
  step_.scattered_bytes += num_bytes;
  return {begin, scatter_end_};
}

Busy Clock::download(int array, int64_t num_bytes, double ready) {
  const double alone = transfer_seconds(num_bytes, rates_.download_gbps);
  const double begin = std::max({download_end_, compute_end_, ready});
  download_end_ = begin + shared_seconds(begin, alone, round_trip_down_end_);
  times(array).on_host_at = {download_end_, kOnMemory};
  times(array).busy_until = download_end_;
  step_.download_seconds += alone;
  step_.downloaded_bytes += num_bytes;
  return {begin, download_end_};
}

Busy Clock::free(int array) {
  ArrayTimes& record = times(array);
  if (record.on_device) {
    record.on_device = false;
    used_bytes_ -= cost(array).num_bytes;
    room_.give(std::max({compute_end_, record.busy_until, record.on_device_at.at}), cost(array).num_bytes);
  }
  if (!postponed_.empty()) forget_postponed(array);
  return {launch_.at, launch_.at};
}

double Clock::transfer_seconds(int64_t num_bytes, double gbps) const {
  return rates_.transfer_latency_seconds + static_cast<double>(num_bytes) / (gbps * 1e9);
}

double Clock::dequantize_seconds(int array) const {
  const auto num_bytes = static_cast<double>(dequantized_bytes(shape_, array));
  return num_bytes == 0 ? 0 : num_bytes / (rates_.device_memory_gbps * 1e9);
}

Busy Clock::enqueue(When& end, When begin, double seconds, Shortage cause) const {
  const bool held_up = begin.at - std::max(end.at, compute_end_) > seconds;
  const double begins = std::max(end.at, begin.at);
  end = {begins + seconds, held_up ? begin.cause : cause};
  return {begins, end.at};
}

void Clock::wait(When when) {
  if (when.at <= compute_end_) return;
  step_.stall_seconds[when.cause] += when.at - compute_end_;
  compute_end_ = when.at;
}

}  // namespace patrickstar
