// The stash: activations that are in host memory between forward and backward.
//
// [Note: stashed activations] What forward keeps for backward is used in the reverse order, so what was kept first is
// used last: that leaves the device when activations take more than their share of it, which the caller knows
// (patrickstar/planning/activation_rules.py), through the download queue, and comes back through the upload queue
// shortly before its use. Its host memory is a guest's ([Note: homes on the host], engine/pager.h): it is had where no
// chunk needs it, also from updates ahead of the step. Where there is none the activation stays on the device. What
// leaves is no part of the tide any more, so plans give chunks that room, but for what will stay in later steps
// (Recorder::count_absent). A measured step's transfers enter the choice of a plan by time (Recorder::note_copies).
//
//   ticket = stash.put(data, num_bytes);   // `data` is needed until is_over(ticket), or finish(ticket)
//   stash.fetch(ticket, to);               // starts the copy back
//   stash.await(ticket);                   // the compute queue has it
//   stash.drop(ticket);
//
// Guarded by the engine's lock.
#pragma once

#include <cstdint>
#include <map>

#include "engine/pager.h"
#include "trace/recorder.h"

namespace patrickstar {

class Stash {
 public:
  using Ticket = int64_t;
  static constexpr Ticket kNoRoom = -1;

  Stash(Pager& pager, Speculation& speculation, Recorder& recorder)
      : pager_(pager), speculation_(speculation), recorder_(recorder) {}
  Stash(const Stash&) = delete;
  Stash& operator=(const Stash&) = delete;

  // What the host may still take of them.
  int64_t host_room_bytes() const { return pager_.guest_room_bytes(); }
  // Starts the copy of what compute enqueued so far has written to `data`. kNoRoom: nothing was done.
  Ticket put(const void* data, int64_t num_bytes);
  // Whether the copy to the host is over; finish() returns when it is, and `data` leaves the device then.
  bool is_over(Ticket ticket) const;
  void finish(Ticket ticket);
  // Starts the copy back to `to`, whose memory compute enqueued so far may still use.
  void fetch(Ticket ticket, void* to);
  // Later work of the compute queue sees what the last fetch() of it brings.
  void await(Ticket ticket);
  // Its host memory is free when nothing uses it any more.
  void drop(Ticket ticket);
  void drop_all();

 private:
  struct Entry {
    HostBlock block;
    Event put;               // complete when the copy to the host is
    Event fetched;           // null: nothing was fetched
    bool is_absent = false;  // from the device
  };
  ChunkMemory& memory() const { return pager_.memory(); }
  Entry& entry(Ticket ticket);
  void set_absent(Entry& entry, bool is_absent);

  Pager& pager_;
  Speculation& speculation_;
  Recorder& recorder_;
  std::map<Ticket, Entry> entries_;
  Ticket next_ticket_ = 0;
  int64_t absent_bytes_ = 0;
};

}  // namespace patrickstar
