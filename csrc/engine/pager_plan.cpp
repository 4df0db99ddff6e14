// The pager's replay of a plan (engine/pager.h).
#include <algorithm>
#include <utility>

#include "engine/pager.h"

namespace patrickstar {

void Pager::begin_access(Phase phase, const std::vector<ArrayId>& acquired) {
  ++clock_;
  ++memory_.counters().num_accesses;
  memory_.tracer().begin_access(phase, acquired);
  recorder_.begin_access(phase, acquired, activation_memory_of_running_access());
  access_is_planned_ = replay_.is_running() && replay_.is_next(phase, acquired);
  if (access_is_planned_) {
    ++memory_.counters().num_replayed_accesses;
    begin_planned();
  } else if (replay_.is_running()) {
    measure_from_here();
    replay_.note_between();
  }
}

void Pager::settle_access() {
  if (access_is_planned_) settle_planned();
  // Arrays evicted above do not count as activation memory of this access.
  if (measures_activation_memory()) memory_.device().take_activation_peak(*this);
  memory_.tracer().settle_access();
}

void Pager::measure_from_here() {
  if (replay_.course() != PlanReplay::Course::kExact) return;
  recorder_.note_activations(activation_memory_of_running_access());
  memory_.device().take_activation_peak(*this);
}

void Pager::skip_access() {
  measure_from_here();
  replay_.note_skipped();
  const std::vector<ArrayId> acquired = replay_.next_access().acquired;
  begin_planned();
  for (ArrayId id : acquired) {
    if (needs_gather(id) || has_outlived_plan(id)) gather_in_turn(id);
  }
  settle_planned();
}

void Pager::begin_planned() {
  replay_.advance();
  drop_outlived();
  for (ArrayId id : replay_.current().evict) evict_as_planned(id);
}

void Pager::settle_planned() {
  const AccessPlan& planned = replay_.current();
  for (ArrayId id : planned.evict_ahead) evict_as_planned(id);
  postponed_.insert(postponed_.end(), planned.prefetch.begin(), planned.prefetch.end());
  // In order: a later one must not take the link or the device buffer of an earlier one.
  auto first_left = postponed_.begin();
  while (first_left != postponed_.end() && prefetch(*first_left)) ++first_left;
  postponed_.erase(postponed_.begin(), first_left);
}

int64_t Pager::activation_memory_of_running_access() {
  const int64_t peak =
      measures_activation_memory() ? memory_.device().take_activation_peak(*this) : replay_.planned_activation_memory();
  replay_.note_activations(peak);
  return peak;
}

const Plan& Pager::plan() const {
  static const Plan none;
  return replay_.has_plan() ? replay_.path().plan : none;
}

void Pager::set_path(const StepPath* path) {
  replay_.set_path(path);
  if (path != nullptr) limit_chunk_buffers(path->buffer_limit);
  if (!replay_.has_plan()) postponed_.clear();
}

void Pager::limit_chunk_buffers(const ChunkBufferLimit& limit) {
  chunk_buffer_limit_ = limit;
  memory_.device_buffers().set_ample_bytes(limit.ample_bytes);
}

// Plans alone decide about values that need all-gathers, since all ranks must enqueue the same ones.
void Pager::switch_to(const StepPath& path) {
  gather_postponed();
  postponed_.clear();
  const int64_t next = replay_.position() + 1;
  const StepPath& before = replay_.path();
  const std::vector<bool> planned = planned_values(before.plan, before.timeline, next, store().num_arrays());
  const auto is_there = [&](ArrayId id) {
    return memory_.is_whole(id) ? planned[static_cast<size_t>(id.index())] : memory_.array(id).on_device;
  };
  replay_.switch_to(path, layout());
  limit_chunk_buffers(path.buffer_limit);
  const std::vector<ArrayId> expected = expected_values(path.plan, path.timeline, next);
  std::vector<bool> is_expected(planned.size());
  for (ArrayId id : expected) is_expected[static_cast<size_t>(id.index())] = true;
  for (ChunkId chunk = 0; chunk < store().num_chunks(); ++chunk) {
    const ArrayId id{chunk, ArrayKind::kParam};
    if (is_there(id) && !is_expected[static_cast<size_t>(id.index())] && !is_placed_on_device(id)) evict_as_planned(id);
  }
  for (ArrayId id : expected) {
    if (!is_there(id)) postponed_.push_back(id);
  }
}

void Pager::restart_replay() {
  replay_.restart(layout());
  postponed_.clear();
  outlived_.clear();
  // All ranks begin with the same values, whatever an evaluation has left on this one.
  for (ChunkId chunk = 0; chunk < store().num_chunks(); ++chunk) {
    const ArrayId id{chunk, ArrayKind::kParam};
    if (memory_.is_whole(id) && (is_evictable(id) || !memory_.array(id).device_buffer)) memory_.drop_device_buffer(id);
  }
}

void Pager::leave_plan() {
  measure_from_here();
  gather_postponed();
  postponed_.clear();
  outlived_.clear();
  replay_.leave();
}

// Other ranks have enqueued these all-gathers already ([Note: the same order on every rank]).
void Pager::gather_in_turn(ArrayId id) {
  const auto end = std::find(postponed_.begin(), postponed_.end(), id);
  gather_postponed(end == postponed_.end() ? postponed_.size() : static_cast<size_t>(end - postponed_.begin()) + 1);
  if (needs_gather(id) || has_outlived_plan(id)) gather(id.chunk);
}

void Pager::gather_postponed(size_t most) {
  size_t left = 0;
  for (size_t count = std::min(most, postponed_.size()); count > 0; --count) {
    const ArrayId id = postponed_[left];
    if (!memory_.is_whole(id)) {  // no other rank waits for it
      ++left;
      continue;
    }
    postponed_.erase(postponed_.begin() + static_cast<std::ptrdiff_t>(left));
    if (needs_gather(id) || has_outlived_plan(id)) gather(id.chunk);
  }
}

void Pager::evict_as_planned(ArrayId id) {
  const ArrayRecord& array = memory_.array(id);
  if (!memory_.is_whole(id)) {
    evict(id, HostRoom::kFree);
  } else if (array.holds > 0) {
    outlived_.push_back(id);
  } else if (!array.device_buffer) {
    memory_.drop_host_buffer(id);
  } else if (is_evictable(id)) {
    memory_.drop_device_buffer(id);
    ++memory_.counters().num_evictions;
  }
}

bool Pager::has_outlived_plan(ArrayId id) const {
  return std::find(outlived_.begin(), outlived_.end(), id) != outlived_.end();
}

bool Pager::take_outlived(ArrayId id) {
  const auto found = std::find(outlived_.begin(), outlived_.end(), id);
  if (found == outlived_.end()) return false;
  outlived_.erase(found);
  return true;
}

void Pager::drop_outlived() {
  const auto is_over = [this](ArrayId id) {
    if (memory_.array(id).holds > 0) return false;
    memory_.drop_device_buffer(id);
    return true;
  };
  outlived_.erase(std::remove_if(outlived_.begin(), outlived_.end(), is_over), outlived_.end());
}

}  // namespace patrickstar
