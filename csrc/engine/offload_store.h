// Activation offload: activations in host memory between forward and backward.
//
// Backward uses activations in reverse order, so those kept first are needed last. The caller offloads them when
// activations exceed their share of the device (patrickstar/activations/activation_rules.py), and fetches them shortly
// before their use.
//
// Their host memory is a best-effort allocation ([Note: resting tiers on the host], engine/pager.h), also from
// speculative updates. Without it the activation stays on the device. Absent activations do not count as activation
// memory, so plans give that room to chunks, except for what will stay in later steps (Recorder::count_absent). The
// choice of a plan accounts for these transfers in a measured step (Recorder::note_copies).
//
//   ticket = offload_store.put(data, num_bytes);   // `data` must stay until is_over(ticket), or finish(ticket)
//   offload_store.fetch(ticket, to);               // starts the copy back
//   offload_store.await(ticket);                   // the compute queue waits for it
//   offload_store.drop(ticket);
//
// Guarded by the engine's lock.
#pragma once

#include <cstdint>
#include <map>

#include "engine/pager.h"
#include "trace/recorder.h"

namespace patrickstar {

class OffloadStore {
 public:
  using Ticket = int64_t;
  static constexpr Ticket kNoRoom = -1;

  OffloadStore(Pager& pager, Speculation& speculation, Recorder& recorder)
      : pager_(pager), speculation_(speculation), recorder_(recorder) {}
  OffloadStore(const OffloadStore&) = delete;
  OffloadStore& operator=(const OffloadStore&) = delete;

  // Host bytes that activations may still take.
  int64_t host_room_bytes() const { return pager_.best_effort_room_bytes(); }
  // Starts copying `data`, as written by compute work enqueued so far. kNoRoom: nothing was done.
  Ticket put(const void* data, int64_t num_bytes);
  // True if the copy to the host is complete. settle() waits for it.
  bool is_over(Ticket ticket) const;
  void settle(Ticket ticket);
  // settle() for an activation that left because the device had no room: until its fetch() it counts as absent.
  void finish(Ticket ticket);
  // Starts the copy back to `to`, after the compute work enqueued so far.
  void fetch(Ticket ticket, void* to);
  // Later work of the compute queue sees the result of the last fetch().
  void await(Ticket ticket);
  // Frees the host memory once nothing uses it. Unknown tickets are ignored.
  void drop(Ticket ticket);
  void drop_all();
  // Most host memory that activations have taken at once.
  int64_t peak_bytes() const { return peak_bytes_; }

 private:
  struct Entry {
    HostBuffer block;
    Event put;               // completes the copy to the host
    Event fetched;           // completes the copy back; null: not fetched
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
  int64_t host_bytes_ = 0;
  int64_t peak_bytes_ = 0;
};

}  // namespace patrickstar
