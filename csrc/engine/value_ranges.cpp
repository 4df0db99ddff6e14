#include "engine/value_ranges.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <map>
#include <memory>
#include <utility>

#include "common/check.h"
#include "common/crc32c.h"
#include "common/sizes.h"
#include "memory/host_mapping.h"

namespace patrickstar {

namespace {

constexpr int64_t kStagingBytes = int64_t{128} << 20;  // each of two pinned pieces; not measured
constexpr int64_t kCheckedGrain = int64_t{64} << 10;   // in a core's cache between copying and the checksum

uint32_t copy_checked(char* to, const char* from, int64_t num_bytes) {
  uint32_t crc = 0;
  for (int64_t begin = 0; begin < num_bytes; begin += kCheckedGrain) {
    const auto count = static_cast<size_t>(std::min(kCheckedGrain, num_bytes - begin));
    std::memcpy(to + begin, from + begin, count);
    crc = crc32c(crc, to + begin, count);
  }
  return crc;
}

void write_file(int descriptor, const char* from, int64_t num_bytes, int64_t at) {
  while (num_bytes > 0) {
    const ssize_t done = pwrite(descriptor, from, static_cast<size_t>(num_bytes), at);
    if (done < 0 && errno == EINTR) continue;
    PS_CHECK(done > 0, SystemError, "cannot write shards into a file: ", std::strerror(errno));
    from += done;
    num_bytes -= done;
    at += done;
  }
}

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

// Copies device memory to files and memory through two pinned pieces: one is filled while the other is copied on.
class ValueRanges::Staging {
 public:
  Staging(ValueRanges& ranges, const std::vector<RangeFile>& files, std::vector<Checked>* checked)
      : ranges_(ranges),
        files_(files),
        checked_(checked),
        backend_(ranges.memory_.backend()),
        memory_(2 * kStagingBytes) {
    backend_.pin(memory_.data(), memory_.num_bytes());
  }
  ~Staging() {
    for (Half& half : halves_) {
      if (half.filled != nullptr) backend_.settle(half.filled);
    }
    if (enqueued_ != nullptr) backend_.settle(enqueued_);
    if (const auto unpin = backend_.unpinner()) unpin(memory_.data(), memory_.num_bytes());
  }
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  // `from`: device memory that is complete in the order of the download queue.
  void add(const char* from, Copy copy) {
    while (copy.num_bytes > 0) {
      if (half().used == kStagingBytes) turn();
      const int64_t num_bytes = std::min(copy.num_bytes, kStagingBytes - half().used);
      char* const to = memory_.data() + current_ * kStagingBytes + half().used;
      backend_.copy(Queue::kDownload, to, from, num_bytes);
      enqueued_ = backend_.record(Queue::kDownload);
      half().copies.push_back({to, num_bytes, copy.file, copy.at});
      half().used += num_bytes;
      from += num_bytes;
      copy.num_bytes -= num_bytes;
      copy.at += num_bytes;
    }
  }
  void finish() {
    turn();
    turn();
  }

 private:
  struct Half {
    std::vector<Copy> copies;
    int64_t used = 0;
    Event filled;
  };

  Half& half() { return halves_[static_cast<size_t>(current_)]; }
  void turn() {
    half().filled = backend_.record(Queue::kDownload);
    current_ = 1 - current_;
    if (half().filled == nullptr) return;
    backend_.synchronize(std::exchange(half().filled, nullptr));
    ranges_.copy_out(half().copies, files_, checked_);
    half().copies.clear();
    half().used = 0;
  }

  ValueRanges& ranges_;
  const std::vector<RangeFile>& files_;
  std::vector<Checked>* const checked_;
  Backend& backend_;
  HostMapping memory_;
  std::array<Half, 2> halves_;
  Event enqueued_;
  int64_t current_ = 0;
};

std::vector<uint32_t> ValueRanges::read_checked(const std::vector<ValueRange>& ranges) {
  std::vector<Checked> parts;
  read(ranges, {}, &parts);
  std::sort(parts.begin(), parts.end(), [](const Checked& one, const Checked& other) { return one.at < other.at; });
  std::vector<uint32_t> crcs;
  for (const ValueRange& range : ranges) {
    auto part = std::lower_bound(parts.begin(), parts.end(), range.at,
                                 [](const Checked& candidate, int64_t at) { return candidate.at < at; });
    uint32_t crc = 0;
    const int64_t end = range.at + float_bytes(range.end - range.begin);
    for (; part != parts.end() && part->at < end; ++part) crc = joined_crc32c(crc, part->crc, part->num_bytes);
    crcs.push_back(crc);
  }
  return crcs;
}

void ValueRanges::read(const std::vector<ValueRange>& ranges, const std::vector<RangeFile>& files,
                       std::vector<Checked>* checked) {
  memory_.device().pool().parallel_for(static_cast<int64_t>(files.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const RangeFile& file = files[static_cast<size_t>(i)];
      if (file.num_bytes == 0) continue;
      const int failure = posix_fallocate(file.descriptor, 0, file.num_bytes);
      PS_CHECK(failure == 0, SystemError, "no room for ", show_exactly(file.num_bytes),
               " of shards in their folder: ", std::strerror(failure), "; free space there");
    }
  });
  std::vector<Copy> copies;
  std::unique_ptr<float[]> values;  // one part, not initialised: first touched by all threads
  int64_t values_numel = 0;
  std::unique_ptr<Staging> staging;
  for (size_t i = 0; i < ranges.size(); ++i) {
    const ValueRange& range = ranges[i];
    const ParamShard shard = shard_of(range);
    const ArrayId id{memory_.layout().placement(range.param).chunk, range.kind};
    if (char* const part = readable(range)) {
      copies.push_back(copy_of(range, part));
    } else if (is_plain(range) && memory_.array(id).on_device) {
      if (staging == nullptr) staging = std::make_unique<Staging>(*this, files, checked);
      memory_.await_on_device(id);
      memory_.backend().wait(Queue::kDownload, memory_.backend().record(Queue::kCompute));
      const char* const from =
          static_cast<const char*>(memory_.array(id).device_buffer.data) + float_bytes(shard.offset);
      staging->add(from + float_bytes(range.begin - shard.begin), copy_of(range, nullptr));
    } else {
      if (i == 0 || !same_array(range, ranges[i - 1])) {
        if (values_numel < shard.numel) {
          values_numel = shard.numel;
          values.reset(new float[static_cast<size_t>(shard.numel)]);
        }
        values_.read_own(range.param, range.kind, values.get());
      }
      copy_out({copy_of(range, reinterpret_cast<char*>(values.get()))}, files, checked);
    }
  }
  if (staging != nullptr) staging->finish();
  copy_out(copies, files, checked);
}

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

void ValueRanges::copy_out(const std::vector<Copy>& copies, const std::vector<RangeFile>& files,
                           std::vector<Checked>* checked) {
  // One task per file: see ValueRanges' header comment.
  std::vector<std::vector<Copy>> tasks(files.size());
  for (const Copy& copy : copies) {
    if (copy.file != kInMemory) {
      tasks[static_cast<size_t>(copy.file)].push_back(copy);
      continue;
    }
    for (int64_t begin = 0; begin < copy.num_bytes; begin += kCopyGrain) {
      tasks.push_back(
          {{copy.memory + begin, std::min(kCopyGrain, copy.num_bytes - begin), kInMemory, copy.at + begin}});
    }
  }
  std::vector<uint32_t> crcs(checked == nullptr ? 0 : tasks.size());
  memory_.device().pool().parallel_for(static_cast<int64_t>(tasks.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      for (const Copy& copy : tasks[static_cast<size_t>(i)]) {
        if (copy.file != kInMemory) {
          write_file(files[static_cast<size_t>(copy.file)].descriptor, copy.memory, copy.num_bytes, copy.at);
        } else if (checked != nullptr) {
          crcs[static_cast<size_t>(i)] = copy_checked(reinterpret_cast<char*>(copy.at), copy.memory, copy.num_bytes);
        } else {
          std::memcpy(reinterpret_cast<void*>(copy.at), copy.memory, static_cast<size_t>(copy.num_bytes));
        }
      }
    }
  });
  for (size_t i = files.size(); i < crcs.size(); ++i) {  // one copy to memory each
    checked->push_back({tasks[i].front().at, tasks[i].front().num_bytes, crcs[i]});
  }
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
