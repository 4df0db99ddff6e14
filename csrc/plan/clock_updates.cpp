// The update instructions of the Clock (plan/clock.h).
#include <algorithm>

#include "plan/clock.h"

namespace patrickstar {

Busy Clock::norm() {
  wait({scatter_end_, kOnCollective});
  const double begin = std::max(launch_.at, compute_end_);
  launch_ = {begin + rates_.synchronize_seconds, kOnLaunch};
  wait(launch_);
  update_in_order_of_need();
  return {begin, launch_.at};
}

Busy Clock::update_on_device(ChunkId chunk) {
  if (grad(chunk).on_device) wait(grad(chunk).on_device_at);
  const double seconds = static_cast<double>(numel(chunk)) / rates_.device_adam_params_per_second;
  step_.device_adam_seconds += seconds;
  compute_end_ += seconds;
  return {compute_end_ - seconds, compute_end_};
}

Busy Clock::inherit(int param_array) {
  const int grad_array = ArrayId{ArrayId::from_index(param_array).chunk, ArrayKind::kGrad}.index();
  used_bytes_ += cost(param_array).num_bytes - cost(grad_array).num_bytes;
  times(grad_array).on_device = false;
  times(param_array) = {true, {compute_end_, kOnMemory}, {}};
  return {launch_.at, launch_.at};
}

Busy Clock::run_host_adam(ChunkId chunk, double begin, double share) {
  const double seconds = share * static_cast<double>(numel(chunk)) / rates_.host_adam_params_per_second;
  begin = std::max(host_adam_end_, begin);
  host_adam_end_ = begin + seconds;
  step_.host_adam_seconds += seconds;
  return {begin, host_adam_end_};
}

Busy Clock::update_on_host(ChunkId chunk, double begin, double share) {
  const Busy busy = run_host_adam(chunk, begin, share);
  param(chunk).on_host_at = {host_adam_end_, kOnHostUpdate};
  param(chunk).is_round_trip_buffer = false;
  return busy;
}

// Takes the update, among those whose gradients are on the host, whose chunk the next forward needs first. If no
// gradient is there, takes the one that arrives first.
void Clock::update_most_needed() {
  const double now = std::max(host_adam_end_, early_updates_.front().ready);
  const auto end = std::find_if(early_updates_.begin(), early_updates_.end(),
                                [now](const EarlyUpdate& update) { return update.ready > now; });
  const auto most_needed = std::min_element(
      early_updates_.begin(), end, [](const EarlyUpdate& a, const EarlyUpdate& b) { return a.chunk < b.chunk; });
  const double share = at(most_needed->instruction).op == Op::kUpdateHost ? 1 : rates_.param_pass;
  spans_[most_needed->instruction] = update_on_host(most_needed->chunk, most_needed->ready, share);
  waiting_gradient_bytes_ -= most_needed->gradient_bytes;
  early_updates_.erase(most_needed);
}

void Clock::update_in_order_of_need() {
  while (!early_updates_.empty()) update_most_needed();
}

void Clock::await_gradient_room(int64_t num_bytes) {
  while (waiting_gradient_bytes_ > problem_.gradient_room_bytes - num_bytes && !early_updates_.empty()) {
    update_most_needed();
    launch_ = later(launch_, {host_adam_end_, kOnHostUpdate});
  }
}

Busy Clock::load(ChunkId chunk) {
  const int64_t num_bytes = shape_.disk_bytes[static_cast<size_t>(chunk)];
  const double seconds = static_cast<double>(num_bytes) / (rates_.disk_read_gbps * 1e9);
  const double begin = std::max({disk_read_end_, backward_begin_, sets_free_.front()});
  disk_read_end_ = begin + seconds;
  step_.disk_read_seconds += seconds;
  step_.disk_read_bytes += num_bytes;
  return {begin, disk_read_end_};
}

Busy Clock::update_from_disk(ChunkId chunk) {
  const double seconds = static_cast<double>(numel(chunk)) / rates_.host_adam_params_per_second;
  const double begin = std::max({disk_adam_end_, disk_read_end_, launch_.at, grad(chunk).on_host_at.at});
  disk_adam_end_ = begin + seconds;
  step_.host_adam_seconds += seconds;
  param(chunk).on_host_at = {disk_adam_end_, kOnHostUpdate};
  return {begin, disk_adam_end_};
}

Busy Clock::store(ChunkId chunk) {
  const int64_t num_bytes = shape_.disk_bytes[static_cast<size_t>(chunk)];
  const double seconds = static_cast<double>(num_bytes) / (rates_.disk_write_gbps * 1e9);
  const double begin = std::max(disk_write_end_, disk_adam_end_);
  disk_write_end_ = begin + seconds;
  std::rotate(sets_free_.begin(), sets_free_.begin() + 1, sets_free_.end());
  sets_free_.back() = disk_write_end_;
  step_.disk_write_seconds += seconds;
  step_.disk_written_bytes += num_bytes;
  return {begin, disk_write_end_};
}

// The device's update time counts as part of the way up.
Busy Clock::round_trip_up(ChunkId chunk) {
  const RoundTripCost& costs = problem_.round_trips[static_cast<size_t>(chunk)];
  const int64_t num_bytes = costs.up_bytes - (param(chunk).on_device ? costs.value_bytes : 0);
  const double alone = static_cast<double>(num_bytes) / (rates_.upload_gbps * 1e9);
  const double begin =
      std::max({compute_end_, grad(chunk).busy_until, round_trip_up_end_, round_trip_buffers_end_.front()});
  round_trip_up_end_ = begin + shared_seconds(begin, alone, upload_end_.at);
  round_trip_up_end_ += static_cast<double>(numel(chunk)) / rates_.device_adam_params_per_second;
  const double down = static_cast<double>(costs.down_bytes) / (rates_.download_gbps * 1e9);
  step_.round_trip_seconds += std::max(alone, down);
  step_.uploaded_bytes += num_bytes;
  return {begin, round_trip_up_end_};
}

Busy Clock::round_trip_down(ChunkId chunk) {
  const int64_t num_bytes = problem_.round_trips[static_cast<size_t>(chunk)].down_bytes;
  const double begin = std::max(round_trip_down_end_, round_trip_up_end_);
  const double alone = static_cast<double>(num_bytes) / (rates_.download_gbps * 1e9);
  round_trip_down_end_ = begin + shared_seconds(begin, alone, download_end_);
  std::rotate(round_trip_buffers_end_.begin(), round_trip_buffers_end_.begin() + 1, round_trip_buffers_end_.end());
  round_trip_buffers_end_.back() = round_trip_down_end_;
  step_.downloaded_bytes += num_bytes;
  param(chunk).on_host_at = {round_trip_down_end_, kOnHostUpdate};
  param(chunk).is_round_trip_buffer = true;
  // a shard is updated in an array of its own
  if (!shape_.is_sharded(chunk)) param(chunk).busy_until = round_trip_down_end_;
  grad(chunk).busy_until = round_trip_down_end_;
  return {begin, round_trip_down_end_};
}

}  // namespace patrickstar
