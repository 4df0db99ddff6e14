#include "engine/stash.h"

#include <utility>

#include "common/check.h"

namespace patrickstar {

namespace {

// Of the device. The rest is for what backward computes again, whose size nobody knows beforehand, and for chunks.
constexpr int64_t kActivationsDivisor = 2;

constexpr ArrayId kNoArray{-1, ArrayKind::kParam};

}  // namespace

int64_t Stash::excess_bytes() const {
  Backend& backend = memory().backend();
  const int64_t limit = backend.limit_bytes();
  return limit == kUnlimited ? 0 : backend.tide_bytes() - limit / kActivationsDivisor;
}

Stash::Ticket Stash::put(const void* data, int64_t num_bytes) {
  HostBlock block = pager_.try_allocate_guest(num_bytes);
  if (!block) return kNoRoom;
  Backend& backend = memory().backend();
  backend.wait(Queue::kDownload, backend.record(Queue::kCompute));
  {
    const TraceScope span(memory().tracer(), {Track::kDownload, StallCause::kNone, kNoArray, num_bytes});
    backend.copy(Queue::kDownload, block.data, data, num_bytes);
  }
  memory().counters().stashed_bytes += num_bytes;
  entries_[next_ticket_] = {std::move(block), backend.record(Queue::kDownload), nullptr};
  return next_ticket_++;
}

bool Stash::is_over(Ticket ticket) const {
  const auto found = entries_.find(ticket);
  return found == entries_.end() || memory().backend().is_over(found->second.put);
}

void Stash::finish(Ticket ticket) {
  const TraceScope stall(memory().tracer(), {Track::kStall, StallCause::kRoom, kNoArray});
  memory().backend().synchronize(entry(ticket).put);
}

void Stash::fetch(Ticket ticket, void* to) {
  Backend& backend = memory().backend();
  Entry& stashed = entry(ticket);
  backend.wait(Queue::kUpload, stashed.put);
  backend.wait(Queue::kUpload, backend.record(Queue::kCompute));
  {
    const TraceScope span(memory().tracer(), {Track::kUpload, StallCause::kNone, kNoArray, stashed.block.num_bytes});
    backend.copy(Queue::kUpload, to, stashed.block.data, stashed.block.num_bytes);
  }
  stashed.fetched = backend.record(Queue::kUpload);
}

void Stash::await(Ticket ticket) {
  const TraceScope stall(memory().tracer(), {Track::kStall, StallCause::kUpload, kNoArray});
  memory().backend().wait(Queue::kCompute, entry(ticket).fetched);
}

void Stash::drop(Ticket ticket) {
  const auto found = entries_.find(ticket);
  if (found == entries_.end()) return;
  Entry& stashed = found->second;
  speculation_.free_after(std::move(stashed.block), stashed.fetched != nullptr ? stashed.fetched : stashed.put);
  entries_.erase(found);
}

void Stash::drop_all() {
  while (!entries_.empty()) drop(entries_.begin()->first);
}

Stash::Entry& Stash::entry(Ticket ticket) {
  const auto found = entries_.find(ticket);
  PS_CHECK(found != entries_.end(), StateError, "activation ", ticket, " is not in the stash");
  return found->second;
}

}  // namespace patrickstar
