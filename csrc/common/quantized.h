// How the values of a frozen parameter are stored in fewer bits: types, blocks, and where the parts of one are. What
// the numbers mean: quant/kernels.h. Torch-free.
#pragma once

#include <cstdint>

namespace patrickstar {

enum class QuantType : uint8_t {
  kNone,  // in the compute dtype
  kNf4,   // [Note: NF4] in quant/kernels.h
  kInt8,  // [Note: int8] in quant/kernels.h
};

constexpr int64_t kNf4Block = 64;        // elements that share a scale of 8 bits
constexpr int64_t kNf4ScaleBlock = 256;  // scales of 8 bits that share a float32 one
constexpr int64_t kNf4SuperBlock = kNf4Block * kNf4ScaleBlock;
constexpr int64_t kInt8Block = 256;       // elements that share a float32 scale
constexpr int64_t kQuantAlignment = 256;  // elements; where a parameter and a shard may begin

constexpr int64_t num_quant_blocks(int64_t numel, int64_t block) { return (numel + block - 1) / block; }

// Bytes of the codes of so many elements.
constexpr int64_t code_bytes(QuantType type, int64_t numel) {
  return type == QuantType::kNf4 ? (numel + 1) / 2 : numel;
}

// The quantised values of elements `first` to `first + numel` of a parameter; `first` begins a block.
struct QuantizedPart {
  QuantType type = QuantType::kNone;
  int64_t first = 0;
  int64_t numel = 0;
  uint8_t* codes = nullptr;         // of the first element on
  uint8_t* block_scales = nullptr;  // NF4: of its block on
  float* scales = nullptr;  // NF4: of the parameter's first super block on; int8: of the first element's block on
  float* offset = nullptr;  // NF4: of all the parameter's scales
};

constexpr const char* quant_type_name(QuantType type) {
  return type == QuantType::kNf4 ? "nf4" : type == QuantType::kInt8 ? "int8" : "none";
}

}  // namespace patrickstar
