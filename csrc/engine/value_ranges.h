// Many ranges of values at once, out of chunks and into them, by all threads: what moves when the number of ranks
// changes. float32 at the border, as in engine/chunk_values.h; here from and to memory or files of any number.
//
// What is float32 where it lies, in host memory, is copied without anything in between; what is on the device goes
// through two pieces of pinned memory in turn; all else as ChunkValues does it. What stays on devices does not pass
// through host memory at all ([Note: stored elements]).
//
// [Note: a thread for each file] A file is written by one thread at a time, since the kernel lets no other one write to
// it meanwhile; so whoever wants many threads gives many files. Any number read from one.
//
// Guarded by the engine's lock.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "engine/chunk_values.h"

namespace patrickstar {

struct ValueRange {
  ParamId param;
  ArrayKind kind;
  int64_t begin;  // elements [begin, end) of the parameter, in its memory order, of this rank's part
  int64_t end;
  int file;    // index, or kInMemory
  int64_t at;  // where the elements are to be or are: an offset in the file, or an address
};

// [Note: stored elements] Of the arrays that a trained parameter consists of (its compute value, where that is kept,
// and the optimizer's), elements as they are stored, which is the same on any number of ranks. Where all of a chunk's
// arrays lie on the device they can be copied from device to device: by this rank's part of a parameter, element by
// element. Blocks of 8 bits are none of them: where blocks begin depends on the rank.
struct StoredRange {
  int array;      // index among the parameter's
  int64_t begin;  // elements [begin, end) of the parameter, of this rank's part
  int64_t end;
  const void* from;  // the first of them
  Tier where;
};

struct RangeFile {
  int descriptor;
  int64_t num_bytes;  // that it is to have, or has
};

class ValueRanges {
 public:
  static constexpr int kInMemory = -1;

  ValueRanges(Pager& pager, ChunkValues& values) : pager_(pager), memory_(pager.memory()), values_(values) {}

  // Out of chunks, as ChunkValues::read_own. Files get their size first, so that there is room for all. Throws
  // SystemError where a file cannot be written.
  void read(const std::vector<ValueRange>& ranges, const std::vector<RangeFile>& files);
  // Into chunks, as ChunkValues::write with the chunk's home. The ranges of one array follow each other, and are
  // together this rank's part of it. Throws SystemError where a file cannot be read.
  void write(const std::vector<ValueRange>& ranges, const std::vector<RangeFile>& files);

  // What an engine that is about to be closed leaves to another one.
  struct SetAside {
    std::vector<const float*> values;   // of each range
    std::shared_ptr<KeptRegions> with;  // regions with values
    std::shared_ptr<KeptRegions> free;  // all others
  };
  // [Note: values set aside] The ranges' values stay in the arena's memory, close together, so that as many regions as
  // can be are free: an array of which little is kept moves into memory that another one has left. Those that do not
  // lie there as float32 are read to their addresses. Everything else of the engine is forgotten: only closing it comes
  // after this. The arena keeps its regions in `free` by now.
  SetAside set_aside(const std::vector<ValueRange>& ranges, std::shared_ptr<KeptRegions> free);

  // [Note: stored elements] Bytes of an element of each of the parameter's arrays; none where they cannot be copied so.
  std::vector<int64_t> stored_bytes(ParamId param) const;
  // Whether all arrays of the parameter's chunk can be copied so, and are on the device.
  bool is_stored_on_device(ParamId param) const;
  // Where this rank's part of each array begins on the device, complete on the compute queue.
  std::vector<const void*> stored_on_device(ParamId param);
  // Into the chunk, on its home; on the compute queue where that is the device. The ranges of each array are together
  // this rank's part of it.
  void write_stored(ParamId param, const std::vector<StoredRange>& ranges);

 private:
  struct Copy {
    char* memory;
    int64_t num_bytes;
    int file;
    int64_t at;
  };
  class Staging;

  ParamShard shard_of(const ValueRange& range) const { return memory_.layout().shard_of(range.param); }
  std::vector<ArrayId> stored_arrays(ParamId param) const;
  bool is_plain(const ValueRange& range) const;
  // The first element of this rank's part of a plain array in host memory, where this thread may read it; null: it is
  // not there.
  char* readable(const ValueRange& range);
  // The same to be written, where all of the part is written next; null: not so.
  char* writable_on_host(const ValueRange& range);
  Copy copy_of(const ValueRange& range, char* part) const;
  void copy_out(const std::vector<Copy>& copies, const std::vector<RangeFile>& files);
  void copy_in(const std::vector<Copy>& copies, const std::vector<RangeFile>& files);

  Pager& pager_;
  ChunkMemory& memory_;
  ChunkValues& values_;
};

}  // namespace patrickstar
