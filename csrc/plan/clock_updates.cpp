// The part of the Clock that plays updates (plan/clock.h).
#include <algorithm>

#include "plan/clock.h"

namespace patrickstar {

void Clock::retire(ArrayId id, size_t moment) {
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
void Clock::finish_step() {
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

void Clock::update(ChunkId chunk) {
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
void Clock::make_room(int64_t num_bytes) {
  if (problem_.limit_bytes == INT64_MAX) return;
  const int64_t most =
      problem_.limit_bytes - problem_.fixed_bytes - tide(problem_, plan_.moments.size() - 1) - num_bytes;
  for (auto chunk = static_cast<ChunkId>(shape_.updates.size()); chunk-- > 0 && used_bytes_ > most;) {
    const int param = ArrayId{chunk, ArrayKind::kParam}.index();
    const bool is_copy = recipe(chunk).states != Tier::kDevice;
    if (is_copy && times(param).on_device) release(param, compute_end_);
  }
}

void Clock::run_host_adam(ChunkId chunk, double begin, double share) {
  const double seconds = share * static_cast<double>(numel(chunk)) / rates_.host_adam_params_per_second;
  host_adam_end_ = std::max(host_adam_end_, begin) + seconds;
  step_.host_adam_seconds += seconds;
}

void Clock::update_on_host(ChunkId chunk, double begin) {
  run_host_adam(chunk, begin, recipe(chunk).passes == Passes::kOne ? 1 : rates_.param_pass);
  ArrayTimes& param = times(ArrayId{chunk, ArrayKind::kParam}.index());
  param.on_host_at = {host_adam_end_, kOnHostUpdate};
  param.is_visitor = false;
}

double Clock::visit(ChunkId chunk, double begin) {
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
void Clock::update_most_needed() {
  const double now = std::max(host_adam_end_, early_updates_.front().ready);
  const auto end = std::find_if(early_updates_.begin(), early_updates_.end(),
                                [now](const EarlyUpdate& update) { return update.ready > now; });
  const auto most_needed = std::min_element(
      early_updates_.begin(), end, [](const EarlyUpdate& a, const EarlyUpdate& b) { return a.chunk < b.chunk; });
  update_on_host(most_needed->chunk, most_needed->ready);
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

void Clock::update_through_disk(ChunkId chunk, double begin) {
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

}  // namespace patrickstar
