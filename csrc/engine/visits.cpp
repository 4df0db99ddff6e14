#include "engine/visits.h"

#include <algorithm>
#include <utility>

#include "common/check.h"
#include "engine/update_jobs.h"

namespace patrickstar {

namespace {

// Address of the pointer's element on the device; null stays null.
template <typename T>
T* at_place(T* pointer, const std::vector<VisitingPart>& parts) {
  if (pointer == nullptr) return nullptr;
  const auto* byte = static_cast<const char*>(static_cast<const void*>(pointer));
  const auto part = std::find_if(parts.begin(), parts.end(), [byte](const VisitingPart& each) {
    return byte >= each.home && byte < each.home + each.num_bytes;
  });
  PS_CHECK(part != parts.end(), StateError, "an update is of memory that is no part of its chunk");
  return static_cast<T*>(static_cast<void*>(part->place + (byte - part->home)));
}

// The chunk's jobs restricted to the piece of `parts`, which are ordered as by parts_of().
std::vector<optim::UpdateJob> jobs_of(const Visit& visit, const std::vector<VisitingPart>& parts, DType dtype,
                                      int64_t first, int64_t last) {
  const std::vector<VisitingPart> states(parts.begin(), parts.end() - 2);
  const std::vector<VisitingPart> value(parts.end() - 2, parts.end() - 1);
  const std::vector<VisitingPart> gradient(parts.end() - 1, parts.end());
  std::vector<optim::UpdateJob> jobs;
  for (const optim::UpdateJob& job : visit.jobs) {
    const auto offset = static_cast<const char*>(job.range.grad) - static_cast<const char*>(visit.grad);
    const int64_t begin = offset / element_size(dtype);
    const int64_t from = std::max(begin, first);
    const int64_t to = std::min(begin + job.range.numel, last);
    if (from >= to) continue;
    optim::UpdateJob part = job;
    part.range = optim::subrange(job.range, from - begin, to - begin);
    part.range.master = at_place(part.range.master, states);
    part.range.momentum = at_place(part.range.momentum, states);
    part.range.variance = at_place(part.range.variance, states);
    part.range.momentum_scales = at_place(part.range.momentum_scales, states);
    part.range.variance_scales = at_place(part.range.variance_scales, states);
    part.range.param = at_place(part.range.param, value);
    part.range.grad = at_place(part.range.grad, gradient);
    jobs.push_back(part);
  }
  return jobs;
}

}  // namespace

bool Visits::take_room() {
  if (slots_.back()) return true;
  const int64_t num_bytes = visiting_piece_bytes(memory_.layout());
  for (Slot& slot : slots_) {
    slot = pager_.try_take_slot(num_bytes);
    if (!slot) {
      leave_room();
      return false;
    }
  }
  // New memory here was last used in the order of the upload queue.
  memory_.backend().wait(Queue::kVisitUp, memory_.backend().record(Queue::kUpload));
  return true;
}

void Visits::leave_room() {
  for (Slot& slot : slots_) slot.reset();
}

// States first, then the value, then the gradient, which stays in its place.
std::vector<VisitingPart> Visits::parts_of(const Visit& visit, int64_t first, int64_t last, char* place) const {
  const ChunkSpec& spec = memory_.store().chunk(visit.chunk);
  std::vector<VisitingPart> parts;
  const auto add = [&](void* home, int64_t num_bytes, bool goes_up, bool comes_down) {
    parts.push_back({static_cast<char*>(home), place, num_bytes, goes_up, comes_down, nullptr});
    place += (num_bytes + kVisitorAlignment - 1) / kVisitorAlignment * kVisitorAlignment;
  };
  for (ArrayKind kind : spec.state_kinds()) {
    const StateType type = spec.states.of(kind);
    const StatePlace home = spec.state_place(kind, memory_.array({visit.chunk, kind}).block.data, first);
    add(home.data, state_offset(type, last) - state_offset(type, first), true, true);
    if (home.scales != nullptr) add(home.scales, num_state_blocks(last - first) * 4, true, true);
  }
  const int64_t offset = first * element_size(spec.dtype);
  const int64_t num_bytes = (last - first) * element_size(spec.dtype);
  add(static_cast<char*>(visit.param) + offset, num_bytes,
      spec.rows.param().source == Source::kNone && visit.value == nullptr, true);
  if (visit.value != nullptr) parts.back().source = static_cast<const char*>(visit.value) + offset;
  char* grad = static_cast<char*>(const_cast<void*>(visit.grad)) + offset;
  parts.push_back({grad, grad, num_bytes, false, false, nullptr});
  return parts;
}

void Visits::update_piece(const Visit& visit, int64_t first, int64_t last) {
  Backend& backend = memory_.backend();
  Counters& counters = memory_.counters();
  Slot& slot = slots_[next_];
  next_ = (next_ + 1) % slots_.size();
  memory_.await_slot(Queue::kVisitUp, slot);
  const std::vector<VisitingPart> parts = parts_of(visit, first, last, static_cast<char*>(slot.data));
  for (const VisitingPart& part : parts) {
    if (!part.goes_up) continue;
    backend.copy(Queue::kVisitUp, part.place, part.home, part.num_bytes);
    counters.uploaded_bytes += part.num_bytes;
  }
  backend.wait(Queue::kVisitUpdate, backend.record(Queue::kVisitUp));
  for (const VisitingPart& part : parts) {
    if (part.source != nullptr) backend.copy(Queue::kVisitUpdate, part.place, part.source, part.num_bytes);
  }
  const DType dtype = memory_.store().chunk(visit.chunk).dtype;
  backend.enqueue(Queue::kVisitUpdate, [&compute = memory_.device_compute(),
                                        jobs = jobs_of(visit, parts, dtype, first, last)] { compute.update(jobs); });
  const Event updated = backend.record(Queue::kVisitUpdate);
  backend.wait(Queue::kVisitDown, updated);
  for (const VisitingPart& part : parts) {
    if (!part.comes_down) continue;
    backend.copy(Queue::kVisitDown, part.home, part.place, part.num_bytes);
    counters.downloaded_bytes += part.num_bytes;
  }
  slot.busy = {backend.record(Queue::kVisitDown), updated};
}

VisitEvents Visits::update(const Visit& visit) {
  Backend& backend = memory_.backend();
  QueueGuard up(backend, Queue::kVisitUp);
  QueueGuard updates(backend, Queue::kVisitUpdate);
  QueueGuard down(backend, Queue::kVisitDown);
  for (const Event& event : visit.after) backend.wait(Queue::kVisitUp, event);
  {
    const TraceScope span(memory_.tracer(), update_label(Track::kVisit, visit.chunk, visit.jobs));
    backend.wait(Queue::kVisitUpdate, visit.grad_ready);
    if (visit.value_ready != nullptr) backend.wait(Queue::kVisitUpdate, visit.value_ready);
    const int64_t numel = memory_.store().chunk(visit.chunk).shard_numel;
    for (int64_t first = 0; first < numel; first += piece_numel_) {
      update_piece(visit, first, std::min(first + piece_numel_, numel));
    }
  }
  VisitEvents events{updates.record(), down.record()};
  up.release();
  return events;
}

}  // namespace patrickstar
