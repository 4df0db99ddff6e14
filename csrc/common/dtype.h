// The element types that chunks hold. Torch-free: kernels and planner use them as well.
#pragma once

#include <cstddef>
#include <cstdint>

namespace patrickstar {

enum class DType : uint8_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

// What an element of an optimizer state is.
enum class StateType : uint8_t {
  kFloat32,
  kLowerHalf,  // of a float32, whose upper half is the bfloat16 compute value: [Note: split masters] in optim/kernels.h
};

constexpr int64_t element_size(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }
constexpr int64_t element_size(StateType type) { return type == StateType::kFloat32 ? 4 : 2; }

constexpr const char* dtype_name(DType dtype) {
  return dtype == DType::kFloat32 ? "float32" : dtype == DType::kBFloat16 ? "bfloat16" : "float16";
}

}  // namespace patrickstar
