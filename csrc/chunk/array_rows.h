// The arrays of a chunk, one row each: size, memory, source of the value. The layout builds the rows, again when a
// chunk becomes trainable; byte counts, placement and costs are sums over them.
//
//   for (const ArrayRow& row : layout.chunk(chunk).rows) bytes += row.on_host == ArrayMemory::kOwn ? row.num_bytes : 0;
//
// With several ranks, the rows of this rank's shards own memory; the whole value is temporary, made of kOtherRanks.
#pragma once

#include <array>
#include <cstdint>

#include "common/types.h"

namespace patrickstar {

// Memory of an array on the tier where its chunk rests.
enum class ArrayMemory : uint8_t {
  kNone,              // no such array in this chunk
  kPassing,           // while the array exists
  kActivationMemory,  // the same, lent by activations if possible (memory/activation_memory.h)
  kShared,            // the place of ArrayRow::shares_with, which is dead by then
  kOwn,               // always
};

// Source from which a dropped value is made again; kNone: it must not be dropped.
enum class Source : uint8_t { kNone, kMaster, kCodes, kOtherRanks };

struct ArrayRow {
  ArrayKind kind = ArrayKind::kParam;
  ArrayMemory on_host = ArrayMemory::kNone;
  ArrayMemory on_device = ArrayMemory::kNone;
  Source source = Source::kNone;
  ArrayKind shares_with = ArrayKind::kParam;  // array with the same place on the host; `kind`: none
  int64_t num_bytes = 0;                      // also of arrays that have no memory

  bool has_place_on_host() const { return on_host == ArrayMemory::kOwn || on_host == ArrayMemory::kShared; }
};

class ArrayRows {
 public:
  ArrayRows() = default;
  // Kinds of param(), gradient() and value().
  ArrayRows(ArrayKind param, ArrayKind gradient, ArrayKind value) : param_(param), gradient_(gradient), value_(value) {}

  ArrayRow& operator[](ArrayKind kind) { return rows_[static_cast<size_t>(kind)]; }
  const ArrayRow& operator[](ArrayKind kind) const { return rows_[static_cast<size_t>(kind)]; }
  const ArrayRow* begin() const { return rows_.data(); }
  const ArrayRow* end() const { return rows_.data() + rows_.size(); }

  // Compute value and gradient that this rank's updates read and write.
  const ArrayRow& param() const { return (*this)[param_]; }
  const ArrayRow& gradient() const { return (*this)[gradient_]; }
  // The array that keeps the value between steps, masters aside.
  const ArrayRow& value() const { return (*this)[value_]; }

  template <typename Filter>
  int64_t num_bytes(const Filter& is_counted) const {
    int64_t bytes = 0;
    for (const ArrayRow& row : rows_) bytes += is_counted(row) ? row.num_bytes : 0;
    return bytes;
  }

 private:
  std::array<ArrayRow, kNumArrayKinds> rows_{};  // by kind
  ArrayKind param_ = ArrayKind::kParam;
  ArrayKind gradient_ = ArrayKind::kGrad;
  ArrayKind value_ = ArrayKind::kParam;
};

}  // namespace patrickstar
