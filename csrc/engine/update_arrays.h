// The arrays that a chunk's update reads and writes: where they are, and what becomes of them.
//
// Guarded by the engine's lock.
#pragma once

#include <vector>

#include "engine/pager.h"
#include "engine/speculation.h"

namespace patrickstar {

class UpdateArrays {
 public:
  UpdateArrays(Pager& pager, Speculation& speculation);

  ArrayId param_of(ChunkId chunk) const { return store_.layout().param_home(chunk); }
  ArrayId grad_of(ChunkId chunk) const { return store_.layout().grad_home(chunk); }

  // The value is made of the master, and its memory may become the gradient's and the other way round.
  bool derives_value(ChunkId chunk) const { return memory_.is_derivable(param_of(chunk)); }
  // The gradient's memory on the host stays its own between updates.
  bool has_gradient_place(ChunkId chunk) const {
    return store_.layout().row(grad_of(chunk)).on_host == ArrayMemory::kOwn;
  }

  // All of the chunk's states are there. Moments are made in the first step.
  bool has_states(ChunkId chunk, Tier tier) const;
  // Pressure may have pushed some of a chunk's states off: they come back rather than that the others follow, for which
  // the host may have no room. So do those of a chunk that is at home on the device, some of which are yet to be made.
  bool belongs_on_device(ChunkId chunk) const;
  // Of the chunk's states what does not exist yet.
  void make_states(ChunkId chunk);
  // When what makes the chunk's states on the host is over.
  void await_states(ChunkId chunk, std::vector<Event>& events) const;
  // From now on `done` makes them.
  void set_states_ready(ChunkId chunk, const Event& done);

  // The value is in host memory; what made it there and what still reads it are over by `events`.
  void bring_value_to_host(ChunkId chunk, std::vector<Event>& events);
  // All copies of the value. Those that all ranks gathered are as old as this rank's own.
  void discard_values(ChunkId chunk);
  void note_new_values(ChunkId chunk);

  // The gradient's memory, which is no longer the gradient's.
  HostBlock take_gradient(ChunkId chunk);
  // The gradient is no longer of use once `done` is complete. Where it has a place of its own, its memory stays there.
  void leave_gradient(ChunkId chunk, const Event& done);

 private:
  Pager& pager_;
  ChunkMemory& memory_;
  ChunkStore& store_;
  Speculation& speculation_;
};

}  // namespace patrickstar
