// Values of quantised parameters, in and out of their chunks: float32 at the border, as engine/chunk_values.h has it.
//
//   write   quantises; what the parameter has already stays as it is, to the last bit
//   read    what the model computes with: dequantised, in the compute dtype
//
// A chunk's codes and scales are made in host memory. Guarded by the engine's lock.
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
        is_guest_(static_cast<size_t>(pager.layout().num_chunks()), 0) {}

  // `values`: all of the parameter's, in host memory. Throws ArgumentError where one is not finite.
  void write(ParamId param, const float* values);
  // This rank's part.
  void read(ParamId param, float* values);

 private:
  const Layout& layout() const { return memory_.layout(); }
  bool has(ParamId param, const float* values);
  // A chunk that is at home on the device goes there when all its parameters have values.
  void settle(ArrayId id);

  Pager& pager_;
  ChunkMemory& memory_;
  std::vector<uint8_t> is_written_;  // by parameter
  std::vector<uint8_t> is_guest_;    // by chunk: on the host while it is written alone
};

}  // namespace patrickstar
