// Reading of value_ranges.h.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <memory>
#include <utility>

#include "common/check.h"
#include "common/crc32c.h"
#include "common/sizes.h"
#include "engine/value_ranges.h"
#include "memory/host_mapping.h"

namespace patrickstar {

namespace {

constexpr int64_t kStagingBytes = int64_t{128} << 20;  // each of two pinned pieces; not measured
constexpr int64_t kPieceBytes = int64_t{1} << 20;      // read at a time from elsewhere; not measured
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

// Collects parts of arrays, and copies those in host memory with all threads when it finishes.
class ValueRanges::Reading {
 public:
  Reading(ValueRanges& ranges, const std::vector<RangeFile>& files, std::vector<Checked>* checked)
      : ranges_(ranges), memory_(ranges.memory_), files_(files), checked_(checked) {}

  void add_values(const ValueRange& range) {
    const ParamShard shard = ranges_.shard_of(range);
    const ArrayId id{memory_.layout().placement(range.param).chunk, range.kind};
    const Copy copy{nullptr, float_bytes(range.end - range.begin), range.file, range.at};
    const int64_t begin = range.begin - shard.begin;
    if (ranges_.is_plain(range) && add_part(id, float_bytes(shard.offset + begin), copy)) return;
    if (values_of_ != std::make_pair(range.param, range.kind)) {
      if (values_numel_ < shard.numel) {
        values_numel_ = shard.numel;
        values_.reset(new float[static_cast<size_t>(shard.numel)]);
      }
      ranges_.values_.read_own(range.param, range.kind, values_.get());
      values_of_ = {range.param, range.kind};
    }
    copy_now(reinterpret_cast<char*>(values_.get() + begin), copy);
  }

  void add_stored(ArrayId id, int64_t offset, Copy copy) {
    if (add_part(id, offset, copy)) return;
    std::vector<char> piece(static_cast<size_t>(std::min(kPieceBytes, copy.num_bytes)));
    for (int64_t done = 0; done < copy.num_bytes; done += kPieceBytes) {
      const int64_t num_bytes = std::min(kPieceBytes, copy.num_bytes - done);
      ranges_.bytes_.read(id, offset + done, piece.data(), num_bytes);
      copy_now(piece.data(), {nullptr, num_bytes, copy.file, copy.at + done});
    }
  }

  void finish() {
    if (staging_ != nullptr) staging_->finish();
    ranges_.copy_out(copies_, files_, checked_);
  }

 private:
  // Adds bytes of an array that is in host memory or on the device; false: it rests on the disk, or was never made.
  bool add_part(ArrayId id, int64_t offset, Copy copy) {
    if (!memory_.array(id).exists()) return false;
    if (char* const array = ranges_.values_.readable(id)) {
      copy.memory = array + offset;
      copies_.push_back(copy);
      return true;
    }
    if (!memory_.array(id).on_device) return false;
    if (staging_ == nullptr) staging_ = std::make_unique<Staging>(ranges_, files_, checked_);
    memory_.await_on_device(id);
    memory_.backend().wait(Queue::kDownload, memory_.backend().record(Queue::kCompute));
    staging_->add(static_cast<const char*>(memory_.array(id).device_buffer.data) + offset, copy);
    return true;
  }

  void copy_now(char* from, Copy copy) {
    copy.memory = from;
    ranges_.copy_out({copy}, files_, checked_);
  }

  ValueRanges& ranges_;
  ChunkMemory& memory_;
  const std::vector<RangeFile>& files_;
  std::vector<Checked>* const checked_;
  std::vector<Copy> copies_;
  std::unique_ptr<Staging> staging_;
  std::unique_ptr<float[]> values_;  // of one array, not initialised: first touched by all threads
  int64_t values_numel_ = 0;
  std::pair<ParamId, ArrayKind> values_of_{-1, ArrayKind::kParam};
};

void ValueRanges::read(const std::vector<ValueRange>& ranges, const std::vector<RangeFile>& files) {
  memory_.device().pool().parallel_for(static_cast<int64_t>(files.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const RangeFile& file = files[static_cast<size_t>(i)];
      if (file.num_bytes == 0) continue;
      const int failure = posix_fallocate(file.descriptor, 0, file.num_bytes);
      PS_CHECK(failure == 0, SystemError, "no room for ", show_exactly(file.num_bytes),
               " of shards in their folder: ", std::strerror(failure), "; free space there");
    }
  });
  Reading reading(*this, files, nullptr);
  for (const ValueRange& range : ranges) reading.add_values(range);
  reading.finish();
}

StateType ValueRanges::stored_type(ParamId param, ArrayKind kind) const {
  const ChunkSpec& spec = memory_.layout().chunk(memory_.layout().placement(param).chunk);
  if (!spec.trainable || spec.is_in_split(kind)) return StateType::kFloat32;
  if (spec.states.has(kind)) return spec.states.of(kind);
  return spec.dtype == DType::kBFloat16 ? StateType::kBFloat16 : StateType::kFloat32;
}

std::vector<uint32_t> ValueRanges::read_stored(const std::vector<StoredBytes>& ranges) {
  const std::vector<RangeFile> no_files;
  std::vector<Checked> parts;
  Reading reading(*this, no_files, &parts);
  for (const StoredBytes& range : ranges) {
    const Layout& layout = memory_.layout();
    const ParamShard shard = layout.shard_of(range.param);
    const ChunkId chunk = layout.placement(range.param).chunk;
    const ChunkSpec& spec = layout.chunk(chunk);
    const StateType type = stored_type(range.param, range.kind);
    if (type == StateType::kFloat32) {
      const int64_t size = float_bytes(1);
      reading.add_values({range.param, range.kind, shard.begin + range.begin / size, shard.begin + range.end / size,
                          kInMemory, range.at});
      continue;
    }
    const ArrayId id = spec.states.has(range.kind) ? ArrayId{chunk, range.kind} : layout.param_resting_tier(chunk);
    // An 8-bit array has the codes of all its parameters before all scales.
    const int64_t codes_end = std::clamp(state_offset(type, shard.numel), range.begin, range.end);
    const int64_t first_scale = is_8_bit(type) ? scales_offset(spec.shard_numel, shard.offset) - shard.numel : 0;
    reading.add_stored(id, state_offset(type, shard.offset) + range.begin,
                       {nullptr, codes_end - range.begin, kInMemory, range.at});
    reading.add_stored(id, first_scale + codes_end,
                       {nullptr, range.end - codes_end, kInMemory, range.at + codes_end - range.begin});
  }
  reading.finish();
  return crcs_of(ranges, std::move(parts));
}

std::vector<uint32_t> ValueRanges::crcs_of(const std::vector<StoredBytes>& ranges, std::vector<Checked> parts) {
  std::sort(parts.begin(), parts.end(), [](const Checked& one, const Checked& other) { return one.at < other.at; });
  std::vector<uint32_t> crcs;
  for (const StoredBytes& range : ranges) {
    auto part = std::lower_bound(parts.begin(), parts.end(), range.at,
                                 [](const Checked& candidate, int64_t at) { return candidate.at < at; });
    uint32_t crc = 0;
    const int64_t end = range.at + range.end - range.begin;
    for (; part != parts.end() && part->at < end; ++part) crc = joined_crc32c(crc, part->crc, part->num_bytes);
    crcs.push_back(crc);
  }
  return crcs;
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

}  // namespace patrickstar
