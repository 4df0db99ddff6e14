#include "engine/stash.h"

#include <utility>

#include "common/check.h"

namespace patrickstar {

namespace {

constexpr ArrayId kNoArray{-1, ArrayKind::kParam};

}  // namespace

Stash::Ticket Stash::put(const void* data, int64_t num_bytes) {
  HostBlock block = pager_.try_allocate_guest(num_bytes);
  if (!block) return kNoRoom;
  Backend& backend = memory().backend();
  QueueGuard downloads(backend, Queue::kDownload);
  backend.wait(Queue::kDownload, backend.record(Queue::kCompute));
  {
    const TraceScope span(memory().tracer(), {Track::kDownload, StallCause::kNone, kNoArray, num_bytes});
    backend.copy(Queue::kDownload, block.data, data, num_bytes);
  }
  memory().counters().stashed_bytes += num_bytes;
  recorder_.note_copies({num_bytes, 0, 0});
  Entry& stashed = entries_[next_ticket_];
  stashed.block = std::move(block);
  stashed.put = downloads.record();
  return next_ticket_++;
}

bool Stash::is_over(Ticket ticket) const {
  const auto found = entries_.find(ticket);
  return found == entries_.end() || memory().backend().is_over(found->second.put);
}

void Stash::finish(Ticket ticket) {
  const TraceScope stall(memory().tracer(), {Track::kStall, StallCause::kRoom, kNoArray});
  Entry& stashed = entry(ticket);
  memory().backend().synchronize(stashed.put);
  set_absent(stashed, true);
}

void Stash::fetch(Ticket ticket, void* to) {
  Backend& backend = memory().backend();
  Entry& stashed = entry(ticket);
  QueueGuard uploads(backend, Queue::kUpload);
  backend.wait(Queue::kUpload, stashed.put);
  backend.wait(Queue::kUpload, backend.record(Queue::kCompute));
  {
    const TraceScope span(memory().tracer(), {Track::kUpload, StallCause::kNone, kNoArray, stashed.block.num_bytes});
    backend.copy(Queue::kUpload, to, stashed.block.data, stashed.block.num_bytes);
  }
  stashed.fetched = uploads.record();
  set_absent(stashed, false);
  recorder_.note_copies({0, stashed.block.num_bytes, 0});
}

void Stash::await(Ticket ticket) {
  const TraceScope stall(memory().tracer(), {Track::kStall, StallCause::kUpload, kNoArray});
  const Entry& stashed = entry(ticket);
  memory().backend().wait(Queue::kCompute, stashed.fetched);
  recorder_.note_copies({0, 0, stashed.block.num_bytes});
}

void Stash::drop(Ticket ticket) {
  const auto found = entries_.find(ticket);
  if (found == entries_.end()) return;
  Entry& stashed = found->second;
  set_absent(stashed, false);
  speculation_.free_after(std::move(stashed.block), stashed.fetched != nullptr ? stashed.fetched : stashed.put);
  entries_.erase(found);
}

void Stash::drop_all() {
  while (!entries_.empty()) drop(entries_.begin()->first);
}

void Stash::set_absent(Entry& entry, bool is_absent) {
  if (std::exchange(entry.is_absent, is_absent) == is_absent) return;
  absent_bytes_ += is_absent ? entry.block.num_bytes : -entry.block.num_bytes;
  recorder_.note_absent(absent_bytes_);
}

Stash::Entry& Stash::entry(Ticket ticket) {
  const auto found = entries_.find(ticket);
  PS_CHECK(found != entries_.end(), StateError, "activation ", ticket, " is not in the stash");
  return found->second;
}

}  // namespace patrickstar
