#include "engine/speculation.h"

#include <algorithm>
#include <new>
#include <numeric>

namespace patrickstar {

namespace {

// Backwards without speculation after the second failure in a row and each further one: 2, 4, 8, 16, 16, ... Not
// measured.
constexpr int kMostFailures = 5;
int pause_after(int failures) { return failures < 2 ? 0 : 1 << (failures - 1); }
// One in so many values has room to be scale-dependent. For a coefficient known to 10 % and a learning rate of 1e-5,
// recomputing them took 1/70 of the time of all values (docs/log.md, `benchmark adam`). In place there is half the
// room, and it must also hold values that cannot be reconstructed; not measured.
constexpr int64_t kElementsPerScaleDependent = 16;
constexpr int64_t kElementsPerScaleDependentInPlace = 32;
// Backwards without speculation after each release of its memory: 4, 8, 16, ..., 256, 256. Not measured.
constexpr int kMostShortages = 7;
int pause_after_shortage(int shortages) { return 2 << shortages; }

}  // namespace

Speculation::Speculation(int num_chunks, UpdateStates& states, HostArena& arena, HostUpdates& updates, Backend& backend,
                         UpdateStart start, int64_t reserve_bytes)
    : states_(states),
      arena_(arena),
      updates_(updates),
      backend_(backend),
      start_(start),
      reserve_bytes_(reserve_bytes),
      pending_(static_cast<size_t>(num_chunks)),
      scale_dependent_(num_chunks, arena, updates) {}

Speculation::~Speculation() { release_memory(); }

void Speculation::expect(std::vector<GroupOptions> groups, ScaleBounds scales) {
  if (is_on() && backwards_to_wait_ > 0) {
    --backwards_to_wait_;
    active_ = false;
    return;
  }
  active_ = is_on() && !groups.empty();
  groups_ = std::move(groups);
  scales_ = scales;
}

void Speculation::forget_choice() {
  chosen_.clear();
  left_bytes_ = 0;
}

void Speculation::leave(int64_t num_bytes) {
  if (num_bytes <= left_bytes_) return;
  chosen_.clear();
  left_bytes_ = num_bytes;
}

void Speculation::choose(const Layout& layout, const std::vector<NewBytes>& sizes) {
  free_completed();
  const int64_t spare = arena_.free_bytes() - arena_.unreserved_bytes();  // mapped, or to be mapped
  // Buffers of the last step count as free: the choice depends on sizes, not on the progress of updates.
  const int64_t leaving = leaving_bytes();
  AheadChoice choice = choose_ahead(sizes, {room_bytes() + leaving, spare + leaving});
  chosen_ = std::move(choice.chosen);
  chosen_numel_ = 0;
  apart_bytes_ = 0;
  any_in_place_ = false;
  for (size_t chunk = 0; chunk < sizes.size(); ++chunk) {
    if (chosen_[chunk] == Ahead::kNothing) continue;
    chosen_numel_ += layout.chunk(static_cast<ChunkId>(chunk)).shard_numel;
    const bool in_place = sizes[chunk].states.empty();
    apart_bytes_ += in_place ? 0 : sizes[chunk].param;
    any_in_place_ = any_in_place_ || in_place;
  }
  reserve(std::move(choice.blocks));
}

int64_t Speculation::leaving_bytes() const {
  int64_t num_bytes = 0;
  for (const auto& [event, block] : leaving_) num_bytes += block.num_bytes;
  return num_bytes;
}

// Reserves as many of them as fit, from the first on.
void Speculation::reserve(std::vector<int64_t> blocks) {
  int64_t reserved = 0;
  size_t count = 0;
  for (; count < blocks.size(); ++count) {
    reserved += blocks[count] + HostArena::kBlockAlignment;
    if (HostArena::most_region_bytes(reserved) > arena_.unreserved_bytes()) break;
  }
  blocks.resize(count);
  if (blocks.empty()) return arena_.prepare_ahead();
  arena_.reserve(blocks);  // for later allocations
  arena_.prepare_ahead();
}

HostBuffer Speculation::try_allocate_param(int64_t num_bytes) {
  if (!allows_passes()) return {};
  free_completed();
  return allows(num_bytes) ? arena_.try_allocate_prepared(num_bytes) : HostBuffer{};
}

NewValues Speculation::try_allocate(const NewBytes& size, Passes passes) {
  NewValues values;
  values.param = try_allocate_param(size.param);
  const bool everything = passes == Passes::kOne && failures_ == 0 &&
                          allows(std::accumulate(size.states.begin(), size.states.end(), int64_t{0}));
  if (!values.param || !everything) return values;
  for (int64_t num_bytes : size.states) values.states.push_back(arena_.try_allocate_prepared(num_bytes));
  const bool complete = std::all_of(values.states.begin(), values.states.end(),
                                    [](const HostBuffer& block) { return static_cast<bool>(block); });
  if (!complete) values.states.clear();
  return values;
}

void Speculation::prepare_scale_dependent() {
  if (!active_ || (scales_.is_exact() && !any_in_place_) || chosen_.empty()) return free_scale_dependent();
  const int64_t left = room_bytes() + leaving_bytes() - apart_bytes_;
  scale_dependent_.take(std::max<int64_t>(left, 0), chosen_numel_,
                        any_in_place_ ? kElementsPerScaleDependentInPlace : kElementsPerScaleDependent);
}

void Speculation::free_scale_dependent() {
  if (scale_dependent_.is_empty()) return;
  Event after;
  for (HostBuffer& block : scale_dependent_.give_back(after)) free_after(std::move(block), after);
}

void Speculation::start(ChunkId chunk, HostUpdate update, NewValues values) {
  auto cancelled = std::make_shared<std::atomic<bool>>(false);
  update.cancelled = cancelled;
  update.chunk = chunk;
  values.done = updates_.submit(std::move(update));
  pending_[static_cast<size_t>(chunk)] = {std::move(values), std::move(cancelled)};
  states_.move(chunk, UpdateState::kAhead);
}

bool Speculation::begin_step(const std::vector<GroupOptions>& groups, double grad_scale) {
  if (!states_.any(UpdateState::kAhead)) return false;
  if (active_ && groups == groups_ && scales_.contains(grad_scale)) {
    failures_ = 0;
    return true;
  }
  failures_ = std::min(failures_ + 1, kMostFailures);
  backwards_to_wait_ = pause_after(failures_);
  cancel_all();
  return false;
}

NewValues Speculation::take(ChunkId chunk) {
  Pending& pending = pending_[static_cast<size_t>(chunk)];
  pending.cancelled = nullptr;
  return std::exchange(pending.values, {});
}

void Speculation::cancel(ChunkId chunk) {
  if (!has(chunk)) return;
  pending_[static_cast<size_t>(chunk)].cancelled->store(true);
  states_.move(chunk, UpdateState::kIdle);
  NewValues values = take(chunk);
  if (values.are_in_place()) return take_back(std::move(values));
  backend_.settle(values.done);
}

// Runs on this thread, so it needs no memory. If the update did not run, all its values count as scale-dependent, and
// nothing is written.
void Speculation::take_back(NewValues values) {
  backend_.settle(values.done);
  HostUpdate back;
  back.pass = Pass::kTakeBack;
  back.jobs = std::move(values.put);
  updates_.run_here(back);
  values.place->on_host = true;
  values.place->host_ready = nullptr;
}

void Speculation::cancel_all() {
  for (Pending& pending : pending_) {
    if (pending.cancelled) pending.cancelled->store(true);  // before the first wait, so that no further update starts
  }
  for (ChunkId chunk = 0; chunk < static_cast<ChunkId>(pending_.size()); ++chunk) cancel(chunk);
}

void Speculation::free_after(HostBuffer block, const Event& after) noexcept {
  if (!block) return;
  try {
    leaving_.emplace_back(after, std::move(block));
  } catch (const std::bad_alloc&) {
    backend_.settle(after);
  }
}

// Updates end in another order than that in which their buffers came here.
bool Speculation::await_free() {
  const size_t num_blocks = leaving_.size();
  while (!leaving_.empty() && leaving_.size() == num_blocks) {
    const int64_t num_seen = updates_.num_over();
    free_completed();
    if (leaving_.size() < num_blocks || updates_.await_more_over(num_seen)) continue;
    backend_.settle(leaving_.front().first);  // not a buffer of an update
  }
  return leaving_.size() < num_blocks;
}

void Speculation::free_completed() {
  leaving_.erase(std::remove_if(leaving_.begin(), leaving_.end(),
                                [this](const auto& entry) { return backend_.is_over(entry.first); }),
                 leaving_.end());
}

void Speculation::release_memory() {
  active_ = false;
  chosen_.clear();
  num_shortages_ = std::min(num_shortages_ + 1, kMostShortages);
  backwards_to_wait_ = pause_after_shortage(num_shortages_);
  cancel_all();
  free_scale_dependent();
  for (const auto& [event, block] : leaving_) backend_.settle(event);
  free_completed();
  arena_.release_reserved();
}

}  // namespace patrickstar
