// Element types of chunks. Torch-free; kernels and the planner use them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace patrickstar {

enum class DType : uint8_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

// Storage of an optimizer state's elements. All-zero bits mean the value 0 in every type.
enum class StateType : uint8_t {
  kFloat32,
  kLowerHalf,  // lower half of a float32 whose upper half is the bfloat16 parameter: [Note: split masters]
  kBFloat16,   // rounded stochastically: [Note: random bits]
  // 8-bit codes of the dynamic map (optim/dynamic_map.h), with one scale per kStateBlock elements. The signed map holds
  // momentum, the unsigned map variance.
  kSigned8,
  kUnsigned8,
  kNone,  // no such array
};

// Elements of an 8-bit state that share a scale.
constexpr int64_t kStateBlock = 256;
constexpr int64_t num_state_blocks(int64_t numel) { return (numel + kStateBlock - 1) / kStateBlock; }
constexpr bool is_8_bit(StateType type) { return type == StateType::kSigned8 || type == StateType::kUnsigned8; }

constexpr int64_t element_size(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

inline char* element_at(void* data, int64_t index, DType dtype) {
  return static_cast<char*>(data) + index * element_size(dtype);
}
inline const char* element_at(const void* data, int64_t index, DType dtype) {
  return static_cast<const char*>(data) + index * element_size(dtype);
}

// Bytes of an array of `numel` elements. An 8-bit array is codes, rounded up to whole blocks, then one float32 scale
// per block.
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
// Bytes from an array's first element to element `index`, which must begin a block in 8-bit types.
constexpr int64_t state_offset(StateType type, int64_t index) {
  return is_8_bit(type) ? index : state_bytes(type, index);
}
// Bytes from the first code of an 8-bit array of `numel` elements to the scale of the block that begins at `index`.
constexpr int64_t scales_offset(int64_t numel, int64_t index) {
  return num_state_blocks(numel) * kStateBlock + index / kStateBlock * 4;
}

constexpr const char* dtype_name(DType dtype) {
  return dtype == DType::kFloat32 ? "float32" : dtype == DType::kBFloat16 ? "bfloat16" : "float16";
}

}  // namespace patrickstar
