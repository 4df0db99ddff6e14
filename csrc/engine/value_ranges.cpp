#include "engine/value_ranges.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <memory>
#include <utility>

#include "common/check.h"
#include "common/sizes.h"

namespace patrickstar {

namespace {

void read_file(int descriptor, char* to, int64_t num_bytes, int64_t at) {
  while (num_bytes > 0) {
    const ssize_t done = pread(descriptor, to, static_cast<size_t>(num_bytes), at);
    if (done < 0 && errno == EINTR) continue;
    PS_CHECK(done >= 0, SystemError, "cannot read shards of a file: ", std::strerror(errno));
    PS_CHECK(done > 0, SystemError, "a file of shards ends ", show_exactly(num_bytes), " too early");
    to += done;
    num_bytes -= done;
    at += done;
  }
}

bool same_array(const ValueRange& one, const ValueRange& other) {
  return one.param == other.param && one.kind == other.kind;
}

}  // namespace

void ValueRanges::write(const std::vector<ValueRange>& ranges, const std::vector<RangeFile>& files) {
  std::vector<Copy> copies;
  std::vector<float> values;
  for (size_t begin = 0; begin < ranges.size();) {
    const ValueRange& first = ranges[begin];
    const ParamShard shard = shard_of(first);
    size_t end = begin;
    int64_t numel = 0;
    for (; end < ranges.size() && same_array(ranges[end], first); ++end) numel += ranges[end].end - ranges[end].begin;
    PS_CHECK(numel == shard.numel, ArgumentError, memory_.store().param_name(first.param), ": ", numel,
             " elements are given of a part of ", shard.numel);
    char* part = writable_on_host(first);
    const bool is_direct = part != nullptr;
    if (!is_direct) {
      values.resize(static_cast<size_t>(shard.numel));
      part = reinterpret_cast<char*>(values.data());
    }
    std::vector<Copy> pieces;
    for (size_t i = begin; i < end; ++i) (is_direct ? copies : pieces).push_back(copy_of(ranges[i], part));
    if (!is_direct) {
      copy_in(pieces, files);
      const ChunkId chunk = memory_.layout().placement(first.param).chunk;
      values_.write(first.param, first.kind, {values.data() - shard.begin, Tier::kHost},
                    memory_.store().resting_tier(chunk));
    }
    begin = end;
  }
  copy_in(copies, files);
}

ValueRanges::SetAside ValueRanges::set_aside(const std::vector<ValueRange>& ranges, std::shared_ptr<KeptRegions> free) {
  struct Span {
    ArrayId id;
    char* begin = nullptr;
    char* end = nullptr;
    char* moved_to = nullptr;
  };
  std::map<int, Span> spans;  // by array index
  std::vector<std::pair<Span*, char*>> places;
  std::vector<ValueRange> elsewhere;
  for (const ValueRange& range : ranges) {
    const ArrayId id{memory_.layout().placement(range.param).chunk, range.kind};
    const bool is_there = is_plain(range) && memory_.array(id).on_host && range.begin < range.end &&
                          memory_.store().resting_tier(id.chunk) != Tier::kDisk;
    if (!is_there) {
      elsewhere.push_back(range);
      places.emplace_back(nullptr, reinterpret_cast<char*>(range.at));
      continue;
    }
    const Copy copy = copy_of(range, readable(range));
    Span& span = spans.try_emplace(id.index(), Span{id, copy.memory, copy.memory, nullptr}).first->second;
    span.begin = std::min(span.begin, copy.memory);
    span.end = std::max(span.end, copy.memory + copy.num_bytes);
    places.emplace_back(&span, copy.memory);
  }
  read(elsewhere, {});
  for (int index = 0; index < memory_.store().num_arrays(); ++index) {
    const ArrayId id = ArrayId::from_index(index);
    spans.count(index) > 0 ? memory_.leave_device(id) : memory_.discard(id);
  }
  const auto abandon = [](HostBuffer& block) {  // its region keeps the memory
    block.num_bytes = 0;
    return static_cast<char*>(std::exchange(block.data, nullptr));
  };
  for (auto& [index, span] : spans) {
    ArrayRecord& record = memory_.array(span.id);
    memory_.settle_block(span.id);
    const int64_t num_bytes = span.end - span.begin;
    HostBuffer target;
    // Moves an array if at least a quarter of its buffer becomes free. Not measured.
    if (num_bytes < record.block.num_bytes / 4 * 3) target = memory_.arena().try_allocate_prepared(num_bytes);
    record.on_host = false;
    if (!target) {
      abandon(record.block);
      span.moved_to = span.begin;
      continue;
    }
    span.moved_to = abandon(target);
    copy_in({{span.moved_to, num_bytes, kInMemory, reinterpret_cast<int64_t>(span.begin)}}, {});
    record.block.reset();
  }
  SetAside result;
  for (const auto& [span, at] : places) {
    char* const now = span == nullptr ? at : span->moved_to + (at - span->begin);
    result.values.push_back(reinterpret_cast<const float*>(now));
  }
  result.free = std::move(free);
  result.with = std::make_shared<KeptRegions>();
  memory_.arena().trim();
  memory_.arena().keep_regions(result.with);
  return result;
}

// float32 for each element, and nothing else.
bool ValueRanges::is_plain(const ValueRange& range) const {
  const ChunkSpec& chunk = memory_.layout().chunk(memory_.layout().placement(range.param).chunk);
  return chunk.trainable && chunk.states.has(range.kind) && !chunk.is_in_split(range.kind) &&
         chunk.states.of(range.kind) == StateType::kFloat32;
}

char* ValueRanges::readable(const ValueRange& range) {
  const ArrayId id{memory_.layout().placement(range.param).chunk, range.kind};
  char* const array = is_plain(range) && memory_.array(id).exists() ? values_.readable(id) : nullptr;
  return array == nullptr ? nullptr : array + float_bytes(shard_of(range).offset);
}

char* ValueRanges::writable_on_host(const ValueRange& range) {
  const ArrayId id{memory_.layout().placement(range.param).chunk, range.kind};
  if (!is_plain(range) || memory_.store().resting_tier(id.chunk) != Tier::kHost) return nullptr;
  pager_.ensure_state(id, Tier::kHost);
  if (memory_.array(id).on_device) return nullptr;
  pager_.bring_to_host(id);
  memory_.array(id).set_on_host();
  if (id.kind == ArrayKind::kMaster) {
    memory_.discard({id.chunk, ArrayKind::kParam});
    memory_.discard(memory_.layout().param_resting_tier(id.chunk));
  }
  return static_cast<char*>(memory_.array(id).block.data) + float_bytes(shard_of(range).offset);
}

ValueRanges::Copy ValueRanges::copy_of(const ValueRange& range, char* part) const {
  char* const memory = part == nullptr ? nullptr : part + float_bytes(range.begin - shard_of(range).begin);
  return {memory, float_bytes(range.end - range.begin), range.file, range.at};
}

void ValueRanges::copy_in(const std::vector<Copy>& copies, const std::vector<RangeFile>& files) {
  std::vector<Copy> pieces;
  for (const Copy& copy : copies) {
    for (int64_t begin = 0; begin < copy.num_bytes; begin += kCopyGrain) {
      pieces.push_back({copy.memory + begin, std::min(kCopyGrain, copy.num_bytes - begin), copy.file, copy.at + begin});
    }
  }
  memory_.device().pool().parallel_for(static_cast<int64_t>(pieces.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Copy& piece = pieces[static_cast<size_t>(i)];
      if (piece.file == kInMemory) {
        std::memcpy(piece.memory, reinterpret_cast<const void*>(piece.at), static_cast<size_t>(piece.num_bytes));
      } else {
        read_file(files[static_cast<size_t>(piece.file)].descriptor, piece.memory, piece.num_bytes, piece.at);
      }
    }
  });
}

}  // namespace patrickstar
