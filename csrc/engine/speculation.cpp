#include "engine/speculation.h"

#include <algorithm>

namespace patrickstar {

namespace {

// After n failures in a row, 2^n backwards go without speculation; at most 2^kMaxPause.
constexpr int kMaxPause = 6;

}  // namespace

Speculation::Speculation(int num_chunks, HostArena& arena, HostUpdates& updates, Backend& backend, SpeculationMode mode,
                         int64_t reserve_bytes)
    : arena_(arena),
      updates_(updates),
      backend_(backend),
      mode_(mode),
      reserve_bytes_(reserve_bytes),
      pending_(static_cast<size_t>(num_chunks)) {}

Speculation::~Speculation() { release_memory(); }

void Speculation::expect(std::vector<GroupOptions> groups, double grad_scale) {
  if (backwards_to_wait_ > 0) {
    --backwards_to_wait_;
    active_ = false;
    return;
  }
  active_ = mode_ == SpeculationMode::kOn && !groups.empty() && !paused_for_memory_;
  groups_ = std::move(groups);
  grad_scale_ = grad_scale;
}

void Speculation::choose(const std::vector<std::pair<int64_t, int64_t>>& sizes) {
  int64_t room = arena_.free_bytes() - reserve_bytes_;
  int64_t spare = arena_.free_bytes() - arena_.unreserved_bytes();  // mapped or to be
  std::vector<int64_t> blocks;
  chosen_.assign(sizes.size(), 0);
  for (size_t chunk = 0; chunk < sizes.size(); ++chunk) {
    const auto [state_bytes, param_bytes] = sizes[chunk];
    const int64_t bytes = 3 * state_bytes + param_bytes;
    if (bytes > room) break;
    room -= bytes;
    chosen_[chunk] = bytes > 0;
    if (spare >= bytes) {
      spare -= bytes;
    } else {
      blocks.insert(blocks.end(), {param_bytes, state_bytes, state_bytes, state_bytes});
    }
  }
  int64_t reserved = 0;
  for (int64_t& bytes : blocks) {
    reserved += bytes + HostArena::kBlockAlignment;
    if (reserved > arena_.unreserved_bytes()) bytes = 0;
  }
  blocks.erase(std::remove(blocks.begin(), blocks.end(), 0), blocks.end());
  arena_.reserve(blocks);
  arena_.prepare_ahead();
}

bool Speculation::try_allocate(int64_t state_bytes, int64_t param_bytes, NewStates& states) {
  free_completed();
  const int64_t num_bytes = 3 * state_bytes + param_bytes;
  if (num_bytes + reserve_bytes_ > arena_.free_bytes()) return false;
  states.param = arena_.try_allocate_prepared(param_bytes);
  bool complete = static_cast<bool>(states.param);
  for (HostBlock& block : states.states) {
    if (complete) block = arena_.try_allocate_prepared(state_bytes);
    complete = complete && static_cast<bool>(block);
  }
  if (!complete) states = {};
  return complete;
}

void Speculation::start(ChunkId chunk, HostUpdate update, NewStates states) {
  Pending& pending = pending_[static_cast<size_t>(chunk)];
  pending.cancelled = std::make_shared<std::atomic<bool>>(false);
  update.cancelled = pending.cancelled;
  update.chunk = chunk;
  states.done = updates_.submit(std::move(update));
  pending.states = std::move(states);
}

bool Speculation::begin_step(const std::vector<GroupOptions>& groups, double grad_scale) {
  const bool started = std::any_of(pending_.begin(), pending_.end(), [](const Pending& p) { return p.cancelled; });
  if (!started) return false;
  if (active_ && groups == groups_ && grad_scale == grad_scale_) {
    failures_ = 0;
    return true;
  }
  failures_ = std::min(failures_ + 1, kMaxPause);
  backwards_to_wait_ = 1 << failures_;
  cancel_all();
  return false;
}

NewStates Speculation::take(ChunkId chunk) {
  Pending& pending = pending_[static_cast<size_t>(chunk)];
  pending.cancelled = nullptr;
  return std::exchange(pending.states, {});
}

void Speculation::cancel(ChunkId chunk) {
  if (!has(chunk)) return;
  pending_[static_cast<size_t>(chunk)].cancelled->store(true);
  const NewStates states = take(chunk);
  backend_.settle(states.done);
}

void Speculation::cancel_all() {
  for (Pending& pending : pending_) {
    if (pending.cancelled) pending.cancelled->store(true);  // before the first wait, so that no other starts
  }
  for (ChunkId chunk = 0; chunk < static_cast<ChunkId>(pending_.size()); ++chunk) cancel(chunk);
}

void Speculation::free_after(HostBlock block, Event after) {
  if (block) leaving_.emplace_back(std::move(after), std::move(block));
}

void Speculation::free_completed() {
  leaving_.erase(std::remove_if(leaving_.begin(), leaving_.end(),
                                [this](const auto& entry) { return backend_.is_over(entry.first); }),
                 leaving_.end());
}

void Speculation::release_memory() {
  paused_for_memory_ = mode_ == SpeculationMode::kOn;
  active_ = false;
  cancel_all();
  for (const auto& [event, block] : leaving_) backend_.settle(event);
  free_completed();
  arena_.release_reserved();
}

}  // namespace patrickstar
