// Storage of frozen parameters in 4 or 8 bits: types, block sizes and pointers. quant/kernels.h defines the numbers.
// Torch-free.
#pragma once

#include <cstdint>

namespace patrickstar {

enum class QuantType : uint8_t {
  kNone,  // stored in the compute dtype
  kNf4,   // 4 bits: quant/kernels.h
  kInt8,  // 8 bits: quant/kernels.h
};

constexpr int64_t kNf4Block = 64;        // elements per 8-bit scale
constexpr int64_t kNf4ScaleBlock = 256;  // 8-bit scales per float32 scale
constexpr int64_t kNf4SuperBlock = kNf4Block * kNf4ScaleBlock;
constexpr int64_t kInt8Block = 256;       // elements per float32 scale
constexpr int64_t kQuantAlignment = 256;  // elements; parameters and shards begin at multiples

constexpr int64_t num_quant_blocks(int64_t numel, int64_t block) { return (numel + block - 1) / block; }

constexpr int64_t code_bytes(QuantType type, int64_t numel) {
  return type == QuantType::kNf4 ? (numel + 1) / 2 : numel;
}

// Quantised values of elements `first` to `first + numel` of a parameter; `first` begins a block.
struct QuantizedPart {
  QuantType type = QuantType::kNone;
  int64_t first = 0;
  int64_t numel = 0;
  uint8_t* codes = nullptr;         // from the first element on
  uint8_t* block_scales = nullptr;  // NF4: from the first element's block on
  float* scales = nullptr;  // NF4: from the parameter's first super block on; int8: from the first element's block on
  float* offset = nullptr;  // NF4: one per parameter
};

constexpr const char* quant_type_name(QuantType type) {
  return type == QuantType::kNf4 ? "nf4" : type == QuantType::kInt8 ? "int8" : "none";
}

}  // namespace patrickstar
