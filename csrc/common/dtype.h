// The element types that chunks hold. Torch-free: kernels and planner use them as well.
#pragma once

#include <cstddef>
#include <cstdint>

namespace patrickstar {

enum class DType : uint8_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

// How the elements of an optimizer state are stored. All bits zero are the value 0 in each of them.
enum class StateType : uint8_t {
  kFloat32,
  kLowerHalf,  // of a float32, whose upper half is the bfloat16 compute value: [Note: split masters] in optim/kernels.h
  kBFloat16,   // rounded stochastically: [Note: random bits] in optim/kernels.h
  // Codes of the dynamic map, in blocks of kStateBlock elements that share a scale: [Note: states of 8 bits] in
  // optim/kernels.h. The signed map is for momentum, the unsigned one for variance.
  kSigned8,
  kUnsigned8,
  kNone,  // there is no such array
};

// Elements of an 8-bit state that share a scale.
constexpr int64_t kStateBlock = 256;
constexpr int64_t num_state_blocks(int64_t numel) { return (numel + kStateBlock - 1) / kStateBlock; }
constexpr bool is_8_bit(StateType type) { return type == StateType::kSigned8 || type == StateType::kUnsigned8; }

constexpr int64_t element_size(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// What an array of `numel` elements takes. One of 8 bits is codes, `numel` of them rounded up to whole blocks, and then
// a float32 scale for each block.
constexpr int64_t state_bytes(StateType type, int64_t numel) {
  switch (type) {
    case StateType::kFloat32:
      return numel * 4;
    case StateType::kLowerHalf:
    case StateType::kBFloat16:
      return numel * 2;
    case StateType::kSigned8:
    case StateType::kUnsigned8:
      return num_state_blocks(numel) * (kStateBlock + 4);
    case StateType::kNone:
      return 0;
  }
  return 0;
}
// Bytes from an array's first element to element `index`, which begins a block where there are blocks.
constexpr int64_t state_offset(StateType type, int64_t index) {
  return is_8_bit(type) ? index : state_bytes(type, index);
}
// Bytes from the first element of an array of `numel` elements of 8 bits to the scale of the block that `index` begins.
constexpr int64_t scales_offset(int64_t numel, int64_t index) {
  return num_state_blocks(numel) * kStateBlock + index / kStateBlock * 4;
}

constexpr const char* dtype_name(DType dtype) {
  return dtype == DType::kFloat32 ? "float32" : dtype == DType::kBFloat16 ? "bfloat16" : "float16";
}

}  // namespace patrickstar
