// The update of a chunk for good, where its optimizer states are or where it visits: all or nothing of it
// (engine/update_states.h).
//
//   chunk_updates.on_device(chunk, groups, grad_scale);
//   chunk_updates.on_host({chunk, next}, groups, grad_scale);
//
// The chunk's gradient is complete. Where one throws, the chunks' arrays may lie elsewhere than before, and have the
// values that they had. Guarded by the engine's lock.
#pragma once

#include <optional>
#include <vector>

#include "engine/early_updates.h"
#include "engine/gradients.h"
#include "engine/pager.h"
#include "engine/speculation.h"
#include "engine/update_arrays.h"
#include "engine/update_jobs.h"
#include "engine/update_states.h"
#include "engine/visits.h"

namespace patrickstar {

// The parts of an engine that updates of chunks use.
struct UpdateParts {
  Pager& pager;
  const Gradients& gradients;
  MatrixUpdates& matrices;
  HostUpdates& host_updates;
  HostUpdates& disk_updates;  // those of chunks whose states are on the disk, so that the others' do not wait for it
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
  // Several chunks whose optimizer states are on the host, or one whose states are on the disk. In two passes where
  // `passes` and memory allow it; returns in how many.
  Passes on_host(const std::vector<ChunkId>& chunks, Passes passes, const std::vector<GroupOptions>& groups,
                 float grad_scale);
  // [Note: visits] (engine/visits.h)
  bool can_visit(ChunkId chunk) const;
  void by_visit(ChunkId chunk, const std::vector<GroupOptions>& groups, float grad_scale);
  Visits& visits() { return visits_; }

 private:
  // Everything that one update on the host takes, allocated before it begins.
  struct Prepared {
    HostUpdate update;
    std::vector<UpdateTarget> targets;             // by chunk
    std::optional<std::vector<HostBlock>> params;  // new_params()
    StatesPass rest;                               // where there are such
  };

  Prepared prepare_on_host(const std::vector<ChunkId>& chunks, Passes passes, const std::vector<GroupOptions>& groups,
                           float grad_scale);
  // Memory for the chunks' new parameters apart from their gradients; nothing when there is none for one of them. The
  // chunks whose gradient is another array need none.
  std::optional<std::vector<HostBlock>> new_params(const std::vector<ChunkId>& chunks);
  // All of the chunk's states come into host memory, those that do not exist as zeros: here, or where they are on the
  // disk as events that `update` waits for.
  void bring_states_to_host(ChunkId chunk, HostUpdate& update);
  UpdateTarget open_target(ChunkId chunk, bool on_device);
  // Memory for the new value where the old one is, which stays as it is so far.
  void* own_place(ArrayId param, bool on_device);
  void close_target(ChunkId chunk, const UpdateTarget& target);
  // `done` makes the new values, and in one pass the states.
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
  Visits visits_;
};

}  // namespace patrickstar
