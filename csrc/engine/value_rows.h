// Copies rows of parameters from host memory, for operations that need few of them: experts chosen by few tokens.
//
//   if (rows.are_on_host(param)) rows.copy(param, {3, 17}, row_numel, to);
//
// Guarded by the engine's lock.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/pager.h"

namespace patrickstar {

class ValueRows {
 public:
  explicit ValueRows(Pager& pager) : pager_(pager), memory_(pager.memory()) {}

  // True if this rank's host has the compute values of the whole parameter, or its master, and the device has neither.
  bool are_on_host(ParamId param) const;
  // Copies rows of `row_numel` elements, one after the other, to device memory `to`; the compute queue waits for them.
  // are_on_host() must hold. Throws ArgumentError for a row that does not exist.
  void copy(ParamId param, const std::vector<int64_t>& rows, int64_t row_numel, void* to);

 private:
  Pager& pager_;
  ChunkMemory& memory_;
};

}  // namespace patrickstar
