// Kernels of cuda_kernels.h: each reads and writes every row once. Torch-free.
#include "experts/cuda_gates.h"

namespace patrickstar::experts::cuda {

namespace {

constexpr int kWarp = 32;
constexpr int kRowsPerBlock = kThreads / kWarp;
// Partial sums of torch.sum over a dimension that is not the last (vt0 of its reduce_kernel).
constexpr int kPartialSums = 4;

template <DType kType>
constexpr int pack_size() {
  return static_cast<int>(16 / sizeof(typename Storage<kType>::Element));
}

template <DType kType>
bool in_packs(int64_t width, std::initializer_list<const void*> arrays) {
  if (width % pack_size<kType>() != 0) return false;
  for (const void* array : arrays) {
    if (!is_aligned(array, 16)) return false;
  }
  return true;
}

// Element i is element i % width of token i / width. Without biases fewer registers are used.
template <DType kType, bool kBiased>
struct SumBody {
  SumRows args;

  template <int kCount>
  __device__ void run(int64_t i) const {
    const int64_t token = i / args.width;
    const int64_t column = i - token * args.width;
    const int64_t first = token * args.num_chosen;
    float sums[kPartialSums][kCount] = {};
    for (int k = 0; k < args.num_chosen; k += kPartialSums) {
      int64_t positions[kPartialSums];
      float x[kPartialSums][kCount] = {};
#pragma unroll
      for (int part = 0; part < kPartialSums; ++part) {  // loads first, so that they overlap
        positions[part] = k + part < args.num_chosen ? args.positions[first + k + part] : -1;
        if (positions[part] >= 0) load<kType>(args.rows, positions[part] * args.width + column, x[part]);
      }
      if constexpr (kBiased) {
#pragma unroll
        for (int part = 0; part < kPartialSums; ++part) {
          if (positions[part] >= 0) add_bias<kType>(args.bias, positions[part], args.width, column, x[part]);
        }
      }
#pragma unroll
      for (int part = 0; part < kPartialSums; ++part) {
        const bool is_weighted = args.weights != nullptr && k + part < args.num_chosen;
        const float weight = is_weighted ? args.weights[first + k + part] : 1.0f;
#pragma unroll
        for (int j = 0; j < kCount; ++j) {
          float product = __fmul_rn(weight, x[part][j]);
          if (args.product_dtype == kType) product = rounded<kType>(product);
          sums[part][j] = __fadd_rn(sums[part][j], product);
        }
      }
    }
    float total[kCount];
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      total[j] = __fadd_rn(__fadd_rn(__fadd_rn(sums[0][j], sums[1][j]), sums[2][j]), sums[3][j]);
    }
    store<kType>(args.out, i, total);
  }
};

// Lane 0 gets the sum of all lanes, in a fixed order.
__device__ float warp_sum(float x) {
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    x = __fadd_rn(x, __shfl_down_sync(0xffffffffu, x, distance));
  }
  return x;
}

// A warp per row.
template <DType kType, int kCount>
__global__ void __launch_bounds__(kThreads) scale_rows_kernel(ScaleRows args) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kRowsPerBlock;
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * kRowsPerBlock + threadIdx.x / kWarp; row < args.num_rows;
       row += step) {
    const int64_t in_grad = args.tokens[row] * args.width;
    const float weight = args.weights[row];
    float dot = 0.0f;
    for (int64_t column = lane * kCount; column < args.width; column += kWarp * kCount) {
      float grad[kCount], x[kCount];
      load<kType>(args.grad_out, in_grad + column, grad);
      load<kType>(args.rows, row * args.width + column, x);
      if (args.bias.values != nullptr) add_bias<kType>(args.bias, row, args.width, column, x);
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        dot = __fadd_rn(dot, __fmul_rn(grad[j], x[j]));
        grad[j] = __fmul_rn(weight, grad[j]);
      }
      store<kType>(args.grad_rows, row * args.width + column, grad);
    }
    dot = warp_sum(dot);
    if (lane == 0) args.grad_weights[row] = dot;
  }
}

// A warp per row.
template <DType kType, int kCount>
__global__ void __launch_bounds__(kThreads) weighted_gate_backward_kernel(WeightedGate args) {
  const SwigluGate<kType> gates{args.gate_up, args.width};
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kRowsPerBlock;
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * kRowsPerBlock + threadIdx.x / kWarp; row < args.num_rows;
       row += step) {
    const float weight = args.weights[row];
    float dot = 0.0f;
    for (int64_t column = lane * kCount; column < args.width; column += kWarp * kCount) {
      float gate[kCount], up[kCount], grad[kCount], out[kCount];
      gates.read(row, column, gate, up);
      load<kType>(args.grad_out, row * args.width + column, grad);
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        out[j] = swiglu<DType::kFloat32>(gate[j], up[j]);
        dot = __fadd_rn(dot, __fmul_rn(out[j], grad[j]));
        out[j] = __fmul_rn(weight, out[j]);
        grad[j] = __fmul_rn(weight, grad[j]);
        const float of_gate = gradient_of_gate<DType::kFloat32>(gate[j], up[j], grad[j]);
        up[j] = gradient_of_up<DType::kFloat32>(gate[j], grad[j]);
        gate[j] = of_gate;
      }
      store<kType>(args.weighted_out, row * args.width + column, out);
      gates.write(args.grad_gate_up, row, column, gate, up);
    }
    dot = warp_sum(dot);
    if (lane == 0) args.grad_weights[row] = dot;
  }
}

// Element i is element i % width of row i / width.
template <DType kType, class Gate>
struct GateBody {
  Gate gate;
  void* out;
  int64_t width;

  template <int kCount>
  __device__ void run(int64_t i) const {
    const int64_t row = i / width;
    float halves[2][kCount];
    gate.read(row, i - row * width, halves[0], halves[1]);
#pragma unroll
    for (int j = 0; j < kCount; ++j) halves[0][j] = gate.value(halves[0][j], halves[1][j]);
    store<kType>(out, i, halves[0]);
  }
};

template <DType kType, class Gate>
struct GateBackwardBody {
  Gate gate;
  const void* grad_out;
  void* grad_gate_up;
  int64_t width;

  template <int kCount>
  __device__ void run(int64_t i) const {
    const int64_t row = i / width;
    const int64_t column = i - row * width;
    float halves[2][kCount], grad[kCount];
    gate.read(row, column, halves[0], halves[1]);
    load<kType>(grad_out, i, grad);
#pragma unroll
    for (int j = 0; j < kCount; ++j) gate.differentiate(grad[j], halves[0][j], halves[1][j]);
    gate.write(grad_gate_up, row, column, halves[0], halves[1]);
  }
};

void check_bias(const char* kernel, const ExpertBias& bias, int64_t num_rows) {
  PS_CHECK(bias.values == nullptr || num_rows <= 0 || bias.num_experts > 0, ArgumentError, kernel, " has ", num_rows,
           " rows, and a bias of no expert");
}

}  // namespace

void sum_rows(const SumRows& args, cudaStream_t stream) {
  with_dtype(args.dtype, [&](auto type) {
    constexpr DType kType = decltype(type)::value;
    const bool packs = in_packs<kType>(args.width, {args.rows, args.bias.values, args.out});
    const int64_t numel = args.num_tokens * args.width;
    if (args.bias.values != nullptr) {
      launch<pack_size<kType>()>("sum_rows", SumBody<kType, true>{args}, packs, numel, stream);
    } else {
      launch<pack_size<kType>()>("sum_rows", SumBody<kType, false>{args}, packs, numel, stream);
    }
  });
}

void scale_rows(const ScaleRows& args, cudaStream_t stream) {
  if (args.num_rows <= 0) return;
  check_bias("scale_rows", args.bias, args.num_rows);
  with_dtype(args.dtype, [&](auto type) {
    constexpr DType kType = decltype(type)::value;
    const unsigned blocks = num_blocks(args.num_rows, kRowsPerBlock);
    if (in_packs<kType>(args.width, {args.grad_out, args.rows, args.bias.values, args.grad_rows})) {
      scale_rows_kernel<kType, pack_size<kType>()><<<blocks, kThreads, 0, stream>>>(args);
    } else {
      scale_rows_kernel<kType, 1><<<blocks, kThreads, 0, stream>>>(args);
    }
    check_launch("scale_rows", args.num_rows * args.width);
  });
}

void gate(const void* gate_up, void* out, DType dtype, int64_t num_rows, int64_t width, cudaStream_t stream) {
  with_dtype(dtype, [&](auto type) {
    constexpr DType kType = decltype(type)::value;
    const GateBody<kType, SwigluGate<kType>> body{{gate_up, width}, out, width};
    launch<pack_size<kType>()>("gate", body, in_packs<kType>(width, {gate_up, out}), num_rows * width, stream);
  });
}

void gate_backward(const void* gate_up, const void* grad_out, void* grad_gate_up, DType dtype, int64_t num_rows,
                   int64_t width, cudaStream_t stream) {
  with_dtype(dtype, [&](auto type) {
    constexpr DType kType = decltype(type)::value;
    const GateBackwardBody<kType, SwigluGate<kType>> body{{gate_up, width}, grad_out, grad_gate_up, width};
    const bool packs = in_packs<kType>(width, {gate_up, grad_out, grad_gate_up});
    launch<pack_size<kType>()>("gate_backward", body, packs, num_rows * width, stream);
  });
}

void weighted_gate_backward(const WeightedGate& args, cudaStream_t stream) {
  if (args.num_rows <= 0) return;
  with_dtype(args.dtype, [&](auto type) {
    constexpr DType kType = decltype(type)::value;
    const unsigned blocks = num_blocks(args.num_rows, kRowsPerBlock);
    if (in_packs<kType>(args.width, {args.gate_up, args.grad_out, args.grad_gate_up, args.weighted_out})) {
      weighted_gate_backward_kernel<kType, pack_size<kType>()><<<blocks, kThreads, 0, stream>>>(args);
    } else {
      weighted_gate_backward_kernel<kType, 1><<<blocks, kThreads, 0, stream>>>(args);
    }
    check_launch("weighted_gate_backward", args.num_rows * args.width);
  });
}

void clamped_gate(const ClampedRows& args, void* out, cudaStream_t stream) {
  check_bias("clamped_gate", args.bias, args.num_rows);
  with_dtype(args.dtype, [&](auto type) {
    constexpr DType kType = decltype(type)::value;
    const GateBody<kType, ClampedGate<kType>> body{{args}, out, args.width};
    const bool packs = in_packs<kType>(args.width, {args.gate_up, args.bias.values, out});
    launch<pack_size<kType>()>("clamped_gate", body, packs, args.num_rows * args.width, stream);
  });
}

void clamped_gate_backward(const ClampedRows& args, const void* grad_out, void* grad_gate_up, cudaStream_t stream) {
  check_bias("clamped_gate_backward", args.bias, args.num_rows);
  with_dtype(args.dtype, [&](auto type) {
    constexpr DType kType = decltype(type)::value;
    const GateBackwardBody<kType, ClampedGate<kType>> body{{args}, grad_out, grad_gate_up, args.width};
    const bool packs = in_packs<kType>(args.width, {args.gate_up, args.bias.values, grad_out, grad_gate_up});
    launch<pack_size<kType>()>("clamped_gate_backward", body, packs, args.num_rows * args.width, stream);
  });
}

}  // namespace patrickstar::experts::cuda
