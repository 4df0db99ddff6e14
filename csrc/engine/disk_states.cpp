#include "engine/disk_states.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "common/check.h"
#include "common/sizes.h"

namespace patrickstar {

namespace {

size_t index_of(ArrayKind kind) {
  const auto kinds = optimizer_arrays();
  return static_cast<size_t>(std::find(kinds.begin(), kinds.end(), kind) - kinds.begin());
}

}  // namespace

DiskStates::DiskStates(ChunkMemory& memory, DiskOptions options) : memory_(memory), options_(std::move(options)) {
  if (options_.file.faults == nullptr) options_.file.faults = std::make_shared<DiskFaults>();
}

DiskStates::~DiskStates() = default;

void DiskStates::open() {
  const Layout& layout = memory_.layout();
  std::vector<Tier> resting_tiers;
  extents_.resize(static_cast<size_t>(layout.num_chunks()));
  int64_t end = 0;
  for (ChunkId chunk = 0; chunk < layout.num_chunks(); ++chunk) {
    resting_tiers.push_back(memory_.store().resting_tier(chunk));
    if (!is_resting_tier_of(chunk)) continue;
    for (ArrayKind kind : layout.chunk(chunk).state_kinds()) {
      extents_[static_cast<size_t>(chunk)][index_of(kind)].offset = end;
      end += DiskFile::round_up(layout.num_bytes({chunk, kind}));
    }
  }
  const DiskSets needed = disk_sets(layout, resting_tiers);
  if (needed.count == 0) return;
  sets_.resize(static_cast<size_t>(needed.count));
  std::vector<int64_t> sizes;
  std::vector<HostBuffer*> places;
  for (Set& set : sets_) {
    for (size_t i = 0; i < optimizer_arrays().size(); ++i) {
      if (needed.block_bytes[i] == 0) continue;
      sizes.push_back(needed.block_bytes[i]);
      places.push_back(&set.blocks[i]);
    }
  }
  std::vector<HostBuffer> blocks = memory_.arena().reserve(sizes);
  std::vector<MemoryRange> ranges;
  for (size_t i = 0; i < blocks.size(); ++i) {
    memory_.arena().prepare(blocks[i]);
    ranges.push_back({static_cast<char*>(blocks[i].data), blocks[i].num_bytes});
    *places[i] = std::move(blocks[i]);
  }
  file_ = std::make_unique<DiskFile>(options_.folder, end, options_.file, ranges);
}

void DiskStates::close() {
  for (Set& set : sets_) {
    take_back(set);
    for (const Event& event : set.busy) memory_.backend().settle(event);
  }
  for (const Event& event : {reads_.record(), writes_.record()}) memory_.backend().settle(event);
  sets_.clear();
  order_.clear();
  running_order_.clear();
  file_.reset();
}

DiskStates::Set* DiskStates::find(ChunkId chunk) {
  const auto found = std::find_if(sets_.begin(), sets_.end(), [chunk](const Set& set) { return set.chunk == chunk; });
  return found == sets_.end() ? nullptr : &*found;
}

void DiskStates::fetch(ChunkId chunk) { fetched(chunk); }

DiskStates::Set& DiskStates::fetched(ChunkId chunk) {
  Set* set = find(chunk);
  if (set == nullptr) {
    set = &evict_one();
    lend(*set, chunk);
  }
  set->last_use = ++clock_;
  return *set;
}

DiskStates::Set& DiskStates::evict_one() {
  Set& oldest = *std::min_element(sets_.begin(), sets_.end(), [](const Set& a, const Set& b) {
    return std::make_pair(a.use, a.last_use) < std::make_pair(b.use, b.last_use);
  });
  if (oldest.use != Use::kFree) store(oldest.chunk);
  take_back(oldest);
  return oldest;
}

void DiskStates::take_back(Set& set) {
  if (set.use == Use::kFree) return;
  set.busy.reserve(set.busy.size() + 2 * optimizer_arrays().size());  // so that nothing below throws
  for (ArrayKind kind : states_of(set.chunk)) {
    ArrayRecord& record = memory_.array({set.chunk, kind});
    set.blocks[index_of(kind)] = std::move(record.block);
    set.busy.push_back(std::exchange(record.host_ready, nullptr));
    set.busy.push_back(std::exchange(record.host_buffer_busy_until, nullptr));
    record.on_host = false;
  }
  set.chunk = -1;
  set.use = Use::kFree;
}

DiskStates::Piece DiskStates::piece(ArrayId id, const HostBuffer& block) {
  Extent& extent = extents_[static_cast<size_t>(id.chunk)][index_of(id.kind)];
  return {id, {block.data, extent.offset, DiskFile::round_up(memory_.layout().num_bytes(id))}, &extent};
}

DiskStates::Passage DiskStates::prepare(DiskDirection direction, std::vector<Piece> pieces) {
  std::vector<DiskRange> ranges;
  Passage passage;
  for (const Piece& piece : pieces) {
    ranges.push_back(piece.range);
    passage.num_bytes += piece.range.num_bytes;
  }
  passage.transfer = file_->prepare(direction, ranges);
  passage.pieces = std::move(pieces);
  return passage;
}

void DiskStates::lend(Set& set, ChunkId chunk) {
  std::vector<Piece> pieces;
  std::vector<Event> written;
  for (ArrayKind kind : states_of(chunk)) {
    if (!memory_.array({chunk, kind}).on_disk) continue;
    pieces.push_back(piece({chunk, kind}, set.blocks[index_of(kind)]));
    written.push_back(pieces.back().extent->written);
  }
  const Passage passage = prepare(DiskDirection::kRead, std::move(pieces));
  const std::shared_ptr<HostSpan> span = open_span(Track::kDiskRead, chunk, passage);
  UnsubmittedSpan unsubmitted(span.get());
  const Event ready = reads_.submit([this, passage, written, span, busy = set.busy] {
    const HostSpanEnd end(span.get());
    for (const Event& event : busy) memory_.backend().settle(event);
    for (const Event& event : written) memory_.backend().synchronize(event);
    const HostSpanScope scope(span.get());
    noting_failures([&] { run_read(passage); });
  });
  unsubmitted.submitted();
  set.busy.clear();
  set.chunk = chunk;
  set.use = Use::kLent;
  memory_.counters().disk_read_bytes += passage.num_bytes;
  for (ArrayKind kind : states_of(chunk)) {
    ArrayRecord& record = memory_.array({chunk, kind});
    record.block = std::move(set.blocks[index_of(kind)]);
    record.block.zeroed = false;
    record.on_host = record.on_disk;
    record.host_ready = ready;
  }
}

std::shared_ptr<HostSpan> DiskStates::open_span(Track track, ChunkId chunk, const Passage& passage) {
  if (passage.num_bytes == 0) return nullptr;
  const SpanLabel label{
      track, StallCause::kNone, {chunk, memory_.layout().chunk(chunk).leading_state()}, passage.num_bytes};
  return memory_.tracer().open_host_span(label, nullptr);
}

void DiskStates::run_read(const Passage& passage) {
  const std::vector<uint32_t> crcs = file_->run(*passage.transfer);
  for (size_t i = 0; i < crcs.size(); ++i) {
    const Piece& piece = passage.pieces[i];
    PS_CHECK(
        crcs[i] == piece.extent->crc, DiskError, "disk_memory: ", memory_.store().describe(piece.id), ": the ",
        show_exactly(piece.range.num_bytes), " that were read in ", options_.folder,
        " are not those that were written (", "CRC-32C ", crcs[i], " instead of ", piece.extent->crc,
        "): the disk, its controller or memory is faulty; set disk_memory.path to a folder on another disk, and go "
        "on from the last checkpoint, which this does not touch");
  }
}

void DiskStates::store(ChunkId chunk) {
  if (find(chunk) == nullptr) return;
  std::vector<Piece> pieces;
  std::vector<Event> after;
  for (ArrayKind kind : states_of(chunk)) {
    const ArrayRecord& record = memory_.array({chunk, kind});
    if (!record.on_host || record.on_disk) continue;
    pieces.push_back(piece({chunk, kind}, record.block));
    after.push_back(record.host_ready);
    after.push_back(record.host_buffer_busy_until);
  }
  if (pieces.empty()) return;
  const Passage passage = prepare(DiskDirection::kWrite, std::move(pieces));
  const std::shared_ptr<HostSpan> span = open_span(Track::kDiskWrite, chunk, passage);
  UnsubmittedSpan unsubmitted(span.get());
  const Event written = writes_.submit([this, passage, after, span] {
    const HostSpanEnd end(span.get());
    for (const Event& event : after) memory_.backend().synchronize(event);
    const HostSpanScope scope(span.get());
    noting_failures([&] { run_write(passage); });
  });
  unsubmitted.submitted();
  memory_.counters().disk_written_bytes += passage.num_bytes;
  for (const Piece& piece : passage.pieces) {
    ArrayRecord& record = memory_.array(piece.id);
    record.on_disk = true;
    record.host_buffer_busy_until = written;
    piece.extent->written = written;
  }
}

void DiskStates::run_write(const Passage& passage) {
  const std::vector<uint32_t> crcs = file_->run(*passage.transfer);
  for (size_t i = 0; i < crcs.size(); ++i) passage.pieces[i].extent->crc = crcs[i];
}

void DiskStates::store_updated(ChunkId chunk) {
  store(chunk);
  running_order_.push_back(chunk);
  if (Set* set = find(chunk)) set->use = Use::kLent;
  const auto found = std::find(order_.begin(), order_.end(), chunk);
  const auto ahead = static_cast<std::ptrdiff_t>(sets_.size());
  if (order_.end() - found > ahead && is_resting_tier_of(found[ahead])) fetched(found[ahead]).use = Use::kExpected;
}

void DiskStates::expect_updates() {
  if (sets_.empty()) return;
  if (!running_order_.empty()) order_ = std::exchange(running_order_, {});
  expect_nothing();
  const size_t count = std::min(sets_.size(), order_.size());
  // No fetch below takes a set from these chunks.
  for (size_t i = 0; i < count; ++i) {
    if (Set* set = find(order_[i])) set->use = Use::kExpected;
  }
  for (size_t i = 0; i < count; ++i) {
    if (is_resting_tier_of(order_[i])) fetched(order_[i]).use = Use::kExpected;
  }
}

void DiskStates::expect_nothing() {
  running_order_.clear();
  for (Set& set : sets_) {
    if (set.use == Use::kExpected) set.use = Use::kLent;
  }
}

void DiskStates::forget(ChunkId chunk) {
  if (Set* set = find(chunk)) take_back(*set);
  for (ArrayKind kind : states_of(chunk)) memory_.array({chunk, kind}).on_disk = false;
}

void DiskStates::move_to_host(ChunkId chunk, std::vector<HostBuffer> blocks) {
  fetch(chunk);
  std::vector<ArrayKind> made;  // the others are made in the first step
  auto block = blocks.begin();
  for (ArrayKind kind : states_of(chunk)) {
    const ArrayId id{chunk, kind};
    char* to = static_cast<char*>((block++)->data);
    if (!memory_.array(id).exists()) continue;
    made.push_back(kind);
    memory_.await_on_host(id);
    const char* from = static_cast<const char*>(memory_.array(id).block.data);
    memory_.device().pool().parallel_for(memory_.layout().num_bytes(id), kCopyGrain,
                                         [from, to](int64_t begin, int64_t end) {
                                           std::memcpy(to + begin, from + begin, static_cast<size_t>(end - begin));
                                         });
  }
  forget(chunk);
  block = blocks.begin();
  for (ArrayKind kind : states_of(chunk)) memory_.array({chunk, kind}).block = std::move(*block++);
  for (ArrayKind kind : made) memory_.array({chunk, kind}).set_on_host();
  memory_.store().set_resting_tier(chunk, Tier::kHost);
}

template <typename Task>
void DiskStates::noting_failures(const Task& task) {
  try {
    task();
  } catch (const DiskError&) {
    const std::lock_guard<std::mutex> lock(failure_mutex_);
    if (!first_failure_) first_failure_ = std::current_exception();
    throw;
  }
}

void DiskStates::check() {
  const std::lock_guard<std::mutex> lock(failure_mutex_);
  if (first_failure_) std::rethrow_exception(first_failure_);
}

}  // namespace patrickstar
