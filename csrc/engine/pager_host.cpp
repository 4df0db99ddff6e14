// The part of the pager that gives out host memory (engine/pager.h).
#include <algorithm>

#include "engine/pager.h"
#include "plan/chunk_bytes.h"

namespace patrickstar {

namespace {

bool is_optimizer_state(ArrayKind kind) {
  const OptimizerArrays states = optimizer_arrays();
  return std::find(states.begin(), states.end(), kind) != states.end();
}

}  // namespace

// [Note: homes on the host]. What was reserved fits the promises, so it is left to them while any is open. The spare is
// for what goes away again: a gradient whose parameters are still of use, a frozen value that is being written.
HostBlock Pager::try_allocate_beside_promises(ArrayId id) {
  const int64_t num_bytes = store().num_bytes(id);
  if (is_promised(id)) return memory_.arena().try_allocate(num_bytes);
  const bool takes_spare = store().home(id.chunk) != Tier::kDevice || !store().chunk(id.chunk).trainable;
  return try_allocate_in_room(num_bytes, takes_spare ? 0 : spare_bytes(layout()));
}

HostBlock Pager::try_allocate_in_room(int64_t num_bytes, int64_t spare) {
  HostArena& arena = memory_.arena();
  const int64_t promised = promised_host_bytes();
  if (num_bytes > arena.free_bytes() - promised - spare) return {};
  return promised == 0 ? arena.try_allocate(num_bytes) : arena.try_allocate_unreserved(num_bytes);
}

HostBlock Pager::try_allocate_guest(int64_t num_bytes) {
  const int64_t spare = spare_bytes(layout());
  speculation_.free_completed();
  HostBlock block = try_allocate_in_room(num_bytes, spare);
  if (!block) {
    speculation_.release_memory();
    block = try_allocate_in_room(num_bytes, spare);
  }
  if (block) memory_.arena().prepare(block);
  return block;
}

HostBlock Pager::try_allocate_home(int64_t num_bytes) {
  speculation_.free_completed();
  HostBlock block = try_allocate_in_room(num_bytes, spare_bytes(layout()));
  if (block) memory_.arena().prepare(block);
  return block;
}

int64_t Pager::guest_room_bytes() const {
  return memory_.arena().free_bytes() - promised_host_bytes() - spare_bytes(layout());
}

bool Pager::is_promised(ArrayId id) const {
  if (keeps_place(id.chunk)) return id == layout().value_home(id.chunk) && !memory_.array(id).block;
  if (store().home(id.chunk) == Tier::kDevice || is_on_disk(id)) return false;
  if (is_optimizer_state(id.kind)) return true;
  if (store().chunk(id.chunk).is_quantized()) return id.kind == ArrayKind::kQuantized && !memory_.array(id).block;
  const ArrayId param{id.chunk, layout().param_home()};
  const ArrayId grad{id.chunk, layout().grad_home()};
  if (id == grad && store().chunk(id.chunk).keeps_gradient()) return !memory_.array(grad).block;
  if (!store().chunk(id.chunk).derives_param()) return id == param && !memory_.array(param).block;
  return (id == param || id == grad) && !memory_.array(param).block && !memory_.array(grad).block;
}

bool Pager::is_on_disk(ArrayId id) const { return is_optimizer_state(id.kind) && disk_.is_home_of(id.chunk); }

bool Pager::is_placed_on_device(ArrayId id) const {
  if (is_optimizer_state(id.kind) || id.kind == ArrayKind::kQuantized) return true;
  const ChunkSpec& spec = store().chunk(id.chunk);
  const bool is_part = (id.kind == layout().param_home() && spec.keeps_param()) ||
                       (id.kind == layout().grad_home() && spec.reserves_gradient());
  return is_part && store().has_states_on_device(id.chunk);
}

int64_t Pager::promised_host_bytes() const {
  int64_t bytes = 0;
  for (ChunkId chunk = 0; chunk < store().num_chunks(); ++chunk) {
    const ArrayId value = layout().value_home(chunk);
    if (is_promised(value)) bytes += store().num_bytes(value);
    const ArrayId grad{chunk, layout().grad_home()};
    if (store().chunk(chunk).keeps_gradient() && is_promised(grad)) bytes += store().num_bytes(grad);
    if (!store().chunk(chunk).trainable || store().home(chunk) != Tier::kHost) continue;
    for (ArrayKind kind : store().chunk(chunk).state_kinds()) {
      if (!memory_.array({chunk, kind}).block) bytes += store().num_bytes({chunk, kind});
    }
  }
  return bytes;
}

}  // namespace patrickstar
