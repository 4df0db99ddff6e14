// Copies many ranges of values out of chunks and into them, by all threads, when the number of ranks changes. Callers
// see float32, as in engine/chunk_values.h, in any number of memory ranges or files.
//
//   float32 in host memory   copied directly
//   float32 on the device    copied through two pieces of pinned memory in turn
//   all else                 as ChunkValues does it
//   device to device         never passes through host memory (`StoredRange`)
//
// Each file is written by one thread at a time, since the kernel serialises writes to a file; use many files for
// parallel writes. Any number of threads may read a file.
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
  int64_t begin;  // elements [begin, end) of the parameter in memory order, within this rank's part
  int64_t end;
  int file;    // index, or kInMemory
  int64_t at;  // source or destination: an offset in the file, or an address
};

// Elements of an array as stored: a trained parameter's compute value, if it is kept, or an optimizer state. Their
// bytes are the same for any number of ranks. If all of a chunk's arrays are on the device, they can be copied between
// devices, element by element. 8-bit states cannot: the begin of their blocks depends on the rank.
struct StoredRange {
  int array;      // index among the parameter's arrays
  int64_t begin;  // elements [begin, end) of the parameter, within this rank's part
  int64_t end;
  const void* from;  // the first element
  Tier where;
};

// Bytes [begin, end) of this rank's part of a parameter's value or state in `ValueRanges::stored_type`. An 8-bit state
// is its codes, followed by one float32 scale for each kStateBlock elements of the part.
struct StoredBytes {
  ParamId param;
  ArrayKind kind;
  int64_t begin;
  int64_t end;
  int64_t at;  // an address
};

struct RangeFile {
  int descriptor;
  int64_t num_bytes;  // required size when writing, actual size when reading
};

class ValueRanges {
 public:
  static constexpr int kInMemory = -1;

  ValueRanges(Pager& pager, ChunkValues& values)
      : pager_(pager), memory_(pager.memory()), values_(values), bytes_(pager) {}

  // Reads values out of chunks, as ChunkValues::read_own. Files are sized first, so that there is room for all. Throws
  // SystemError if a file cannot be written.
  void read(const std::vector<ValueRange>& ranges, const std::vector<RangeFile>& files);
  // Type of an array's elements in `StoredBytes`; float32 for split masters and frozen parameters.
  StateType stored_type(ParamId param, ArrayKind kind) const;
  // Reads bytes into memory and returns each range's CRC-32C, taken while its bytes are in the cache.
  std::vector<uint32_t> read_stored(const std::vector<StoredBytes>& ranges);
  // Writes values into chunks, as ChunkValues::write on the chunk's resting tier. Ranges of one array must be
  // consecutive and cover this rank's part of it. Throws SystemError if a file cannot be read.
  void write(const std::vector<ValueRange>& ranges, const std::vector<RangeFile>& files);

  // Memory that an engine leaves to its successor when it closes.
  struct SetAside {
    std::vector<const float*> values;   // by range
    std::shared_ptr<KeptRegions> with;  // regions that hold values
    std::shared_ptr<KeptRegions> free;  // all other regions
  };
  // Keeps the ranges' values in the arena, packed so that most regions become free: an array of which little is kept
  // moves into memory that another one has left. Values that are not float32 in host memory are read to their
  // addresses. All else of the engine is forgotten, and only closing it may follow. The arena must keep its regions in
  // `free` already.
  SetAside set_aside(const std::vector<ValueRange>& ranges, std::shared_ptr<KeptRegions> free);

  // Bytes per element of each of the parameter's arrays; empty if they cannot be copied as stored (`StoredRange`).
  std::vector<int64_t> stored_bytes(ParamId param) const;
  // True if all arrays of the parameter's chunk can be copied as stored and are on the device.
  bool is_stored_on_device(ParamId param) const;
  // Device addresses of this rank's part of each array, complete in the order of the compute queue.
  std::vector<const void*> stored_on_device(ParamId param);
  // Writes into the chunk, on its resting tier; on the device, in the order of the compute queue. Ranges of each array
  // must cover this rank's part of it.
  void write_stored(ParamId param, const std::vector<StoredRange>& ranges);

 private:
  struct Copy {
    char* memory;
    int64_t num_bytes;
    int file;
    int64_t at;
  };
  struct Checked {
    int64_t at;
    int64_t num_bytes;
    uint32_t crc;
  };
  class Staging;
  class Reading;

  ParamShard shard_of(const ValueRange& range) const { return memory_.layout().shard_of(range.param); }
  std::vector<ArrayId> stored_arrays(ParamId param) const;
  bool is_plain(const ValueRange& range) const;
  // The first element of this rank's part in host memory, where this thread may read it; null if it is elsewhere or not
  // float32.
  char* readable(const ValueRange& range);
  // readable() for writing, if the caller overwrites the whole part; null as well.
  char* writable_on_host(const ValueRange& range);
  Copy copy_of(const ValueRange& range, char* part) const;
  static std::vector<uint32_t> crcs_of(const std::vector<StoredBytes>& ranges, std::vector<Checked> parts);
  // Adds the checksums of what is copied to memory to `checked`, unless it is null.
  void copy_out(const std::vector<Copy>& copies, const std::vector<RangeFile>& files, std::vector<Checked>* checked);
  void copy_in(const std::vector<Copy>& copies, const std::vector<RangeFile>& files);

  Pager& pager_;
  ChunkMemory& memory_;
  ChunkValues& values_;
  ArrayBytes bytes_;
};

}  // namespace patrickstar
