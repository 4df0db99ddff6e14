// Reads and writes values of quantised parameters in their chunks. Callers see float32, as in engine/chunk_values.h.
//
//   write   quantises; values that the parameter already has stay as they are, to the last bit
//   read    the values that the model computes with: dequantised, in the compute dtype
//
// Codes and scales are made in host memory. Guarded by the engine's lock.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/pager.h"

namespace patrickstar {

class QuantizedValues {
 public:
  explicit QuantizedValues(Pager& pager)
      : pager_(pager),
        memory_(pager.memory()),
        is_written_(static_cast<size_t>(pager.layout().num_params()), 0),
        is_best_effort_(static_cast<size_t>(pager.layout().num_chunks()), 0) {}

  // `values`: the whole parameter, in host memory. Throws ArgumentError for values that are not finite.
  void write(ParamId param, const float* values);
  void read(ParamId param, float* values);

 private:
  const Layout& layout() const { return memory_.layout(); }
  bool has(ParamId param, const float* values);
  // Moves a chunk that rests on the device there, once all its parameters have values.
  void settle(ArrayId id);

  Pager& pager_;
  ChunkMemory& memory_;
  std::vector<uint8_t> is_written_;      // by parameter
  std::vector<uint8_t> is_best_effort_;  // by chunk: on the host only while it is written
};

}  // namespace patrickstar
