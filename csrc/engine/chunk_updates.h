// A chunk's update that is never rolled back: where its optimizer states are, or on the device by a round
// trip (engine/round_trips.h).
//
//   chunk_updates.on_device(chunk, groups, grad_scale);
//   chunk_updates.on_host({chunk, next}, groups, grad_scale);
//
// The chunk's gradient must be complete. If a call throws before an update has begun, arrays may have moved, but all
// values are unchanged (`UpdateStates`). Guarded by the engine's lock.
#pragma once

#include <optional>
#include <vector>

#include "engine/early_updates.h"
#include "engine/gradients.h"
#include "engine/pager.h"
#include "engine/round_trips.h"
#include "engine/speculation.h"
#include "engine/update_arrays.h"
#include "engine/update_jobs.h"
#include "engine/update_states.h"

namespace patrickstar {

// The parts of an engine that updates of chunks use.
struct UpdateParts {
  Pager& pager;
  const Gradients& gradients;
  MatrixUpdates& matrices;
  HostUpdates& host_updates;
  HostUpdates& disk_updates;  // for chunks whose states are on the disk, so that other updates never wait for the disk
  Speculation& speculation;
  UpdateArrays& arrays;
  UpdateJobs& jobs;
  EarlyUpdates& early;
  UpdateStates& states;
};

class ChunkUpdates {
 public:
  explicit ChunkUpdates(const UpdateParts& parts);

  void on_device(ChunkId chunk, const std::vector<GroupOptions>& groups, float grad_scale);
  // Updates several chunks whose states are on the host, or one whose states are on the disk. Two-phase if `passes` and
  // memory allow it; returns the number of phases.
  Passes on_host(const std::vector<ChunkId>& chunks, Passes passes, const std::vector<GroupOptions>& groups,
                 float grad_scale);
  // Round-trip update of the chunk on the device (engine/round_trips.h).
  bool can_round_trip(ChunkId chunk) const;
  void by_round_trip(ChunkId chunk, const std::vector<GroupOptions>& groups, float grad_scale);
  RoundTrips& round_trips() { return round_trips_; }

 private:
  // All memory and jobs of one update on the host, allocated before it begins.
  struct Prepared {
    HostUpdate update;
    std::vector<UpdateTarget> targets;              // by chunk
    std::optional<std::vector<HostBuffer>> params;  // new_params(); empty: a one-phase update
    StatesPass rest;                                // phase two, if there is one
  };

  Prepared prepare_on_host(const std::vector<ChunkId>& chunks, Passes passes, const std::vector<GroupOptions>& groups,
                           float grad_scale);
  // Memory for the chunks' new parameters beside their gradients; nothing if it is short for one of them. A chunk whose
  // gradient is an accumulated sum needs none.
  std::optional<std::vector<HostBuffer>> new_params(const std::vector<ChunkId>& chunks);
  // Brings all states of the chunk to host memory and makes missing ones as zeros. `update` gets events to wait for
  // where the states come from the disk.
  void bring_states_to_host(ChunkId chunk, HostUpdate& update);
  UpdateTarget open_target(ChunkId chunk, bool on_device);
  // Memory of the old value, to which the new one is written; the old value stays until then.
  void* own_place(ArrayId param, bool on_device);
  void close_target(ChunkId chunk, const UpdateTarget& target);
  // `done`: the event after which the new values, and in a one-phase update the states, are complete.
  void note_on_host(const Prepared& prepared, ChunkId chunk, const UpdateTarget& target, const Event& done);

  Pager& pager_;
  ChunkMemory& memory_;
  ChunkStore& store_;
  const Gradients& gradients_;
  MatrixUpdates& matrices_;
  DiskStates& disk_;
  HostUpdates& host_updates_;
  HostUpdates& disk_updates_;
  Speculation& speculation_;
  UpdateArrays& arrays_;
  UpdateJobs& jobs_;
  EarlyUpdates& early_;
  UpdateStates& states_;
  RoundTrips round_trips_;
};

}  // namespace patrickstar
