// The arrays that a chunk's update reads and writes: their tiers, and what happens to them afterwards.
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

  ArrayId param_of(ChunkId chunk) const { return store_.layout().param_resting_tier(chunk); }
  ArrayId grad_of(ChunkId chunk) const { return store_.layout().grad_resting_tier(chunk); }

  // The value is rounded from the master, so value and gradient may take each other's memory.
  bool derives_value(ChunkId chunk) const { return memory_.is_derivable(param_of(chunk)); }
  // The gradient keeps its memory on the host between updates.
  bool has_gradient_place(ChunkId chunk) const {
    return store_.layout().row(grad_of(chunk)).on_host == ArrayMemory::kOwn;
  }

  // True if all states of the chunk exist on `tier`. States other than masters are made in the first step.
  bool has_states(ChunkId chunk, Tier tier) const;
  // True if a state of the chunk is on the device, or is missing and rests there. If pressure has evicted some states,
  // these return, since the host may have no room for the others.
  bool belongs_on_device(ChunkId chunk) const;
  void make_states(ChunkId chunk);
  // Adds the events after which the chunk's states on the host are complete.
  void await_states(ChunkId chunk, std::vector<Event>& events) const;
  // From now on, `done` completes the chunk's states.
  void set_states_ready(ChunkId chunk, const Event& done);

  // Brings the value to host memory. Adds the events after which it is complete and no reader remains.
  void bring_value_to_host(ChunkId chunk, std::vector<Event>& events);
  // Discards all copies of the value, also the all-gathered one, which is as old.
  void discard_values(ChunkId chunk);
  void note_new_values(ChunkId chunk);

  HostBuffer take_gradient(ChunkId chunk);
  // Frees the gradient's host buffer once `done` is complete; reserved memory stays with the gradient.
  void leave_gradient(ChunkId chunk, const Event& done);

 private:
  Pager& pager_;
  ChunkMemory& memory_;
  ChunkStore& store_;
  Speculation& speculation_;
};

}  // namespace patrickstar
