// Speculation: updates on the host that start before the norm of all gradients is known.
//
// Clipping and loss scaling need that norm, which is known after backward. The resulting factor is nearly always the
// expected one. So a chunk is updated into separate memory as soon as its gradient is on the host. The step then takes
// the new values over without a copy, or rolls them back and updates the chunk again.
//
// [Note: exact speculation] Old states and the gradient stay untouched until the step. Values that are taken over were
// computed from the step's very inputs, so results do not depend on speculation.
//
//   memory per parameter   what is computed before the norm (16-bit training)
//   14 bytes               everything
//   2 bytes                parameters; states follow behind the step ([Note: two-phase updates], engine/update_jobs.h)
//   less                   parameters in place, if masters are split and the gradient has memory of its own; only
//                          scale-dependent values take memory (optim/kernels.h). A rollback writes the old parameters
//
// If clipping acts, the 2-byte form computes parameters for all factors near the last one. The step recomputes
// scale-dependent values, which differ among these factors.
//
//   expect(groups, scales)         before a backward
//   start(chunk, update, ...)      its gradient is complete
//   begin_step(groups, grad_scale) true if the step is among the expected ones
//   take(chunk)                    its new values; or cancel(chunk)
//
// If memory is short, chunks that the next forward needs first are chosen. After a failed expectation, parameters alone
// are computed until one holds again; after repeated failures, speculation pauses. Guarded by the engine's lock.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "common/types.h"
#include "engine/scale_dependent_memory.h"
#include "engine/scale_forecast.h"
#include "engine/update_jobs.h"
#include "engine/update_states.h"
#include "memory/host_arena.h"
#include "plan/host_demand.h"
#include "plan/recipe.h"

namespace patrickstar {

class Speculation {
 public:
  // `reserve_bytes` of host memory are left free.
  Speculation(int num_chunks, UpdateStates& states, HostArena& arena, HostUpdates& updates, Backend& backend,
              UpdateStart start, int64_t reserve_bytes);
  ~Speculation();

  void expect(std::vector<GroupOptions> groups, ScaleBounds scales);
  bool is_committing() const { return start_ == UpdateStart::kCommitted; }
  bool commits() const { return is_committing() && !groups_.empty(); }
  const std::vector<GroupOptions>& expected_groups() const { return groups_; }
  const ScaleBounds& expected_scales() const { return scales_; }

  // Chooses the chunks for which host memory suffices, in the order of the next forward, and prepares the memory.
  // `sizes`: by chunk.
  void choose(const Layout& layout, const std::vector<NewBytes>& sizes);
  bool must_choose() const { return is_on() && chosen_.empty() && backwards_to_wait_ == 0; }
  // The next choice starts over: other chunks have their states on the host.
  void forget_choice();
  // Leaves `num_bytes` more than reserve_bytes free. The next choice starts over if that is more than before.
  void leave(int64_t num_bytes);
  int64_t left_bytes() const { return left_bytes_; }
  // True in a backward whose step is expected.
  bool is_active() const { return active_; }
  // True after failed expectations or a shortage of memory, while no update starts early.
  bool is_paused() const { return backwards_to_wait_ > 0; }
  // How much of the chunk's update may start early, by memory.
  Ahead ahead(ChunkId chunk) const { return allows_passes() ? chosen_[static_cast<size_t>(chunk)] : Ahead::kNothing; }

  // True if memory may be used for two-phase updates. False before choose(): free memory may still be needed for states
  // to be made.
  bool allows_passes() const { return is_on() && !chosen_.empty(); }
  // Memory for the new parameters of a chunk; empty if there is none, or before choose().
  HostBuffer try_allocate_param(int64_t num_bytes);
  // Memory for as many of a chunk's new values as are computed early; empty as above.
  NewValues try_allocate(const NewBytes& size, Passes passes);
  void start(ChunkId chunk, HostUpdate update, NewValues values);
  // Before a backward, after choose(): memory for scale-dependent values, if there can be any.
  void prepare_scale_dependent();
  bool has_scale_dependent_memory() const { return !scale_dependent_.is_empty(); }
  int64_t num_values_in_place() const { return scale_dependent_.num_in_place(); }
  // Assigns places for the scale-dependent values of a chunk's jobs.
  void keep_scale_dependent(ChunkId chunk, std::vector<optim::UpdateJob>& jobs) { scale_dependent_.keep(chunk, jobs); }
  void begin_scale_dependent(ChunkId chunk, std::vector<optim::UpdateJob>& jobs) {
    scale_dependent_.begin(chunk, jobs);
  }
  bool has(ChunkId chunk) const { return states_.is(chunk, UpdateState::kAhead); }

  bool begin_step(const std::vector<GroupOptions>& groups, double grad_scale);
  // The new values that were started for the chunk. Valid until take(); then move the chunk's UpdateState to made.
  const NewValues& pending(ChunkId chunk) const { return pending_[static_cast<size_t>(chunk)].values; }
  NewValues take(ChunkId chunk);
  // Cancels the chunk's update or rolls it back; returns when nothing of it runs.
  void cancel(ChunkId chunk);
  void cancel_all();
  void free_after(HostBuffer block, const Event& after) noexcept;
  // Frees host buffers of completed updates.
  void free_completed();
  // Waits until a buffer of free_after() is free. False if none is pending.
  bool await_free();
  // Gives back all host memory of speculation. The next choice starts over some backwards later.
  void release_memory();

 private:
  bool is_on() const { return start_ == UpdateStart::kSpeculative; }
  struct Pending {
    NewValues values;
    std::shared_ptr<std::atomic<bool>> cancelled;
  };
  // Host memory for speculation, beside what is left free.
  int64_t room_bytes() const { return arena_.free_bytes() - reserve_bytes_ - left_bytes_; }
  bool allows(int64_t num_bytes) const { return num_bytes <= room_bytes(); }
  // Bytes of buffers that wait in free_after().
  int64_t leaving_bytes() const;
  void reserve(std::vector<int64_t> blocks);
  void free_scale_dependent();
  // Writes the old parameters again; returns when they are complete.
  void take_back(NewValues values);

  UpdateStates& states_;
  HostArena& arena_;
  HostUpdates& updates_;
  Backend& backend_;
  UpdateStart start_;
  int64_t reserve_bytes_;
  int64_t left_bytes_ = 0;        // left free beside reserve_bytes_, since the last forgotten choice
  std::vector<Pending> pending_;  // by chunk
  std::vector<Ahead> chosen_;     // by chunk
  int64_t chosen_numel_ = 0;      // of chosen chunks
  int64_t apart_bytes_ = 0;       // of chosen chunks' new parameters, unless in place
  bool any_in_place_ = false;
  ScaleDependentMemory scale_dependent_;
  std::vector<std::pair<Event, HostBuffer>> leaving_;
  std::vector<GroupOptions> groups_;
  ScaleBounds scales_;
  bool active_ = false;
  int failures_ = 0;       // in a row
  int num_shortages_ = 0;  // releases of memory that others needed
  int backwards_to_wait_ = 0;
};

}  // namespace patrickstar
