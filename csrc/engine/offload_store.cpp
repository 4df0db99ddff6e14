#include "engine/offload_store.h"

#include <algorithm>
#include <utility>

#include "common/check.h"

namespace patrickstar {

namespace {

constexpr ArrayId kNoArray{-1, ArrayKind::kParam};

}  // namespace

OffloadStore::Ticket OffloadStore::put(const void* data, int64_t num_bytes) {
  HostBuffer block = pager_.try_allocate_best_effort(num_bytes);
  if (!block) return kNoRoom;
  Backend& backend = memory().backend();
  QueueGuard downloads(backend, Queue::kDownload);
  backend.wait(Queue::kDownload, backend.record(Queue::kCompute));
  {
    const TraceScope span(memory().tracer(), {Track::kDownload, StallCause::kNone, kNoArray, num_bytes});
    backend.copy(Queue::kDownload, block.data, data, num_bytes);
  }
  memory().counters().offloaded_bytes += num_bytes;
  recorder_.note_copies({num_bytes, 0, 0});
  Entry& offloaded = entries_[next_ticket_];
  offloaded.block = std::move(block);
  offloaded.put = downloads.record();
  host_bytes_ += offloaded.block.num_bytes;
  peak_bytes_ = std::max(peak_bytes_, host_bytes_);
  return next_ticket_++;
}

bool OffloadStore::is_over(Ticket ticket) const {
  const auto found = entries_.find(ticket);
  return found == entries_.end() || memory().backend().is_over(found->second.put);
}

void OffloadStore::settle(Ticket ticket) {
  const TraceScope stall(memory().tracer(), {Track::kStall, StallCause::kRoom, kNoArray});
  memory().backend().synchronize(entry(ticket).put);
}

void OffloadStore::finish(Ticket ticket) {
  settle(ticket);
  set_absent(entry(ticket), true);
}

void OffloadStore::fetch(Ticket ticket, void* to) {
  Backend& backend = memory().backend();
  Entry& offloaded = entry(ticket);
  QueueGuard uploads(backend, Queue::kUpload);
  backend.wait(Queue::kUpload, offloaded.put);
  backend.wait(Queue::kUpload, backend.record(Queue::kCompute));
  {
    const TraceScope span(memory().tracer(), {Track::kUpload, StallCause::kNone, kNoArray, offloaded.block.num_bytes});
    backend.copy(Queue::kUpload, to, offloaded.block.data, offloaded.block.num_bytes);
  }
  offloaded.fetched = uploads.record();
  set_absent(offloaded, false);
  recorder_.note_copies({0, offloaded.block.num_bytes, 0});
}

void OffloadStore::await(Ticket ticket) {
  const TraceScope stall(memory().tracer(), {Track::kStall, StallCause::kUpload, kNoArray});
  const Entry& offloaded = entry(ticket);
  memory().backend().wait(Queue::kCompute, offloaded.fetched);
  recorder_.note_copies({0, 0, offloaded.block.num_bytes});
}

void OffloadStore::drop(Ticket ticket) {
  const auto found = entries_.find(ticket);
  if (found == entries_.end()) return;
  Entry& offloaded = found->second;
  set_absent(offloaded, false);
  host_bytes_ -= offloaded.block.num_bytes;
  speculation_.free_after(std::move(offloaded.block), offloaded.fetched != nullptr ? offloaded.fetched : offloaded.put);
  entries_.erase(found);
}

void OffloadStore::drop_all() {
  while (!entries_.empty()) drop(entries_.begin()->first);
}

void OffloadStore::set_absent(Entry& entry, bool is_absent) {
  if (std::exchange(entry.is_absent, is_absent) == is_absent) return;
  absent_bytes_ += is_absent ? entry.block.num_bytes : -entry.block.num_bytes;
  recorder_.note_absent(absent_bytes_);
}

OffloadStore::Entry& OffloadStore::entry(Ticket ticket) {
  const auto found = entries_.find(ticket);
  PS_CHECK(found != entries_.end(), StateError, "activation ", ticket, " is not in the offload store");
  return found->second;
}

}  // namespace patrickstar
