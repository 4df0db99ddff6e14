// The arrays of a chunk, a row for each: its size, where it has memory, what its value is made from. The layout makes
// them once, and again when a chunk is trained; bytes, homes, promises and costs are sums and filters over them.
//
//   for (const ArrayRow& row : layout.chunk(chunk).rows) bytes += row.on_host == ArrayMemory::kOwn ? row.num_bytes : 0;
//
// With several ranks the rows of this rank's shards have memory; the whole value passes, made of kOtherRanks.
#pragma once

#include <array>
#include <cstdint>

#include "common/types.h"

namespace patrickstar {

// Memory of an array on a tier where its chunk is at home.
enum class ArrayMemory : uint8_t {
  kNone,     // a chunk like this has no such array
  kPassing,  // while the array is there
  kTide,     // the same, where activations were if they leave it ([Note: gradients in the tide], engine/pager.h)
  kShared,   // place of ArrayRow::shares_with, which is dead by then
  kOwn,      // at all times
};

// Origin of a value that may be dropped at any time; kNone: it may not.
enum class Source : uint8_t { kNone, kMaster, kCodes, kOtherRanks };

struct ArrayRow {
  ArrayKind kind = ArrayKind::kParam;
  ArrayMemory on_host = ArrayMemory::kNone;
  ArrayMemory on_device = ArrayMemory::kNone;
  Source source = Source::kNone;
  ArrayKind shares_with = ArrayKind::kParam;  // array with the same place on the host; `kind` where there is none
  int64_t num_bytes = 0;                      // that it would have, where there is none

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

  // Compute value and gradient as updates read and write them: of this rank.
  const ArrayRow& param() const { return (*this)[param_]; }
  const ArrayRow& gradient() const { return (*this)[gradient_]; }
  // The array that has the value between steps, but for a master.
  const ArrayRow& value() const { return (*this)[value_]; }

  // Bytes of the rows that `is_counted` is true of.
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
