#include "engine/round_trips.h"

#include <algorithm>
#include <utility>

#include "common/check.h"
#include "engine/update_jobs.h"

namespace patrickstar {

namespace {

// Address of the pointer's element on the device; null stays null.
template <typename T>
T* at_place(T* pointer, const std::vector<RoundTripPart>& parts) {
  if (pointer == nullptr) return nullptr;
  const auto* byte = static_cast<const char*>(static_cast<const void*>(pointer));
  const auto part = std::find_if(parts.begin(), parts.end(), [byte](const RoundTripPart& each) {
    return byte >= each.at_rest && byte < each.at_rest + each.num_bytes;
  });
  PS_CHECK(part != parts.end(), StateError, "an update is of memory that is no part of its chunk");
  return static_cast<T*>(static_cast<void*>(part->place + (byte - part->at_rest)));
}

// The chunk's jobs restricted to the piece of `parts`, which are ordered as by parts_of().
std::vector<optim::UpdateJob> jobs_of(const RoundTrip& round_trip, const std::vector<RoundTripPart>& parts, DType dtype,
                                      int64_t first, int64_t last) {
  const std::vector<RoundTripPart> states(parts.begin(), parts.end() - 2);
  const std::vector<RoundTripPart> value(parts.end() - 2, parts.end() - 1);
  const std::vector<RoundTripPart> gradient(parts.end() - 1, parts.end());
  std::vector<optim::UpdateJob> jobs;
  for (const optim::UpdateJob& job : round_trip.jobs) {
    const auto offset = static_cast<const char*>(job.range.grad) - static_cast<const char*>(round_trip.grad);
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

bool RoundTrips::take_room() {
  if (device_buffers_.back()) return true;
  const int64_t num_bytes = round_trip_piece_bytes(memory_.layout());
  for (DeviceBuffer& device_buffer : device_buffers_) {
    device_buffer = pager_.try_take_device_buffer(num_bytes);
    if (!device_buffer) {
      leave_room();
      return false;
    }
  }
  // New memory here was last used in the order of the upload queue.
  memory_.backend().wait(Queue::kRoundTripUp, memory_.backend().record(Queue::kUpload));
  return true;
}

void RoundTrips::leave_room() {
  for (DeviceBuffer& device_buffer : device_buffers_) device_buffer.reset();
}

// States first, then the value, then the gradient, which stays in its place.
std::vector<RoundTripPart> RoundTrips::parts_of(const RoundTrip& round_trip, int64_t first, int64_t last,
                                                char* place) const {
  const ChunkSpec& spec = memory_.store().chunk(round_trip.chunk);
  std::vector<RoundTripPart> parts;
  const auto add = [&](void* at_rest, int64_t num_bytes, bool goes_up, bool comes_down) {
    parts.push_back({static_cast<char*>(at_rest), place, num_bytes, goes_up, comes_down, nullptr});
    place += (num_bytes + kRoundTripAlignment - 1) / kRoundTripAlignment * kRoundTripAlignment;
  };
  for (ArrayKind kind : spec.state_kinds()) {
    const StateType type = spec.states.of(kind);
    const StatePlace at_rest = spec.state_place(kind, memory_.array({round_trip.chunk, kind}).block.data, first);
    add(at_rest.data, state_offset(type, last) - state_offset(type, first), true, true);
    if (at_rest.scales != nullptr) add(at_rest.scales, num_state_blocks(last - first) * 4, true, true);
  }
  const int64_t offset = first * element_size(spec.dtype);
  const int64_t num_bytes = (last - first) * element_size(spec.dtype);
  add(static_cast<char*>(round_trip.param) + offset, num_bytes,
      spec.rows.param().source == Source::kNone && round_trip.value == nullptr, true);
  if (round_trip.value != nullptr) parts.back().source = static_cast<const char*>(round_trip.value) + offset;
  char* grad = static_cast<char*>(const_cast<void*>(round_trip.grad)) + offset;
  parts.push_back({grad, grad, num_bytes, false, false, nullptr});
  return parts;
}

void RoundTrips::update_piece(const RoundTrip& round_trip, int64_t first, int64_t last) {
  Backend& backend = memory_.backend();
  Counters& counters = memory_.counters();
  DeviceBuffer& device_buffer = device_buffers_[next_];
  next_ = (next_ + 1) % device_buffers_.size();
  memory_.await_device_buffer(Queue::kRoundTripUp, device_buffer);
  const std::vector<RoundTripPart> parts = parts_of(round_trip, first, last, static_cast<char*>(device_buffer.data));
  for (const RoundTripPart& part : parts) {
    if (!part.goes_up) continue;
    backend.copy(Queue::kRoundTripUp, part.place, part.at_rest, part.num_bytes);
    counters.uploaded_bytes += part.num_bytes;
  }
  backend.wait(Queue::kRoundTripUpdate, backend.record(Queue::kRoundTripUp));
  for (const RoundTripPart& part : parts) {
    if (part.source != nullptr) backend.copy(Queue::kRoundTripUpdate, part.place, part.source, part.num_bytes);
  }
  const DType dtype = memory_.store().chunk(round_trip.chunk).dtype;
  backend.enqueue(Queue::kRoundTripUpdate,
                  [&compute = memory_.device_compute(), jobs = jobs_of(round_trip, parts, dtype, first, last)] {
                    compute.update(jobs);
                  });
  const Event updated = backend.record(Queue::kRoundTripUpdate);
  backend.wait(Queue::kRoundTripDown, updated);
  for (const RoundTripPart& part : parts) {
    if (!part.comes_down) continue;
    backend.copy(Queue::kRoundTripDown, part.at_rest, part.place, part.num_bytes);
    counters.downloaded_bytes += part.num_bytes;
  }
  device_buffer.busy = {backend.record(Queue::kRoundTripDown), updated};
}

RoundTripEvents RoundTrips::update(const RoundTrip& round_trip) {
  Backend& backend = memory_.backend();
  QueueGuard up(backend, Queue::kRoundTripUp);
  QueueGuard updates(backend, Queue::kRoundTripUpdate);
  QueueGuard down(backend, Queue::kRoundTripDown);
  for (const Event& event : round_trip.after) backend.wait(Queue::kRoundTripUp, event);
  {
    const TraceScope span(memory_.tracer(), update_label(Track::kRoundTrip, round_trip.chunk, round_trip.jobs));
    backend.wait(Queue::kRoundTripUpdate, round_trip.grad_ready);
    if (round_trip.value_ready != nullptr) backend.wait(Queue::kRoundTripUpdate, round_trip.value_ready);
    const int64_t numel = memory_.store().chunk(round_trip.chunk).shard_numel;
    for (int64_t first = 0; first < numel; first += piece_numel_) {
      update_piece(round_trip, first, std::min(first + piece_numel_, numel));
    }
  }
  RoundTripEvents events{updates.record(), down.record()};
  up.release();
  return events;
}

}  // namespace patrickstar
