// Casts, sums and norms on CUDA (kernels.h). Torch-free. Intrinsics with an explicit rounding mode keep the compiler
// from contracting, whatever its flags.
#include <cstdint>

#include "common/cuda_elementwise.h"
#include "optim/cuda_kernels.h"

namespace patrickstar::optim::cuda {

namespace {

using namespace patrickstar::cuda;

template <DType kIn, DType kOut>
struct CastBody {
  const void* in;
  void* out;

  template <int kCount>
  __device__ void run(int64_t i) const {
    float x[kCount];
    load<kIn>(in, i, x);
    store<kOut>(out, i, x);
  }
};

template <DType kSum, DType kIn>
struct AddBody {
  void* sum;
  const void* x;

  template <int kCount>
  __device__ void run(int64_t i) const {
    float a[kCount], b[kCount];
    load<kSum>(sum, i, a);
    load<kIn>(x, i, b);
#pragma unroll
    for (int k = 0; k < kCount; ++k) a[k] = quiet(__fadd_rn(a[k], b[k]));
    store<kSum>(sum, i, a);
  }
};

struct ScaleBody {
  float* values;
  float factor;

  template <int kCount>
  __device__ void run(int64_t i) const {
    float x[kCount];
    load<DType::kFloat32>(values, i, x);
#pragma unroll
    for (int k = 0; k < kCount; ++k) x[k] = __fmul_rn(x[k], factor);
    store<DType::kFloat32>(values, i, x);
  }
};

// One thread block per block of elements, thread l for lane l: [Note: one order of summation].
template <DType kType>
__global__ void __launch_bounds__(kSquaresLanes) squares(const void* x, int64_t numel, double* partials) {
  using Element = typename Storage<kType>::Element;
  const int lane = static_cast<int>(threadIdx.x);
  __shared__ double upper[kSquaresLanes / 2];
  for (int64_t block = blockIdx.x; block * kSquaresBlock < numel; block += gridDim.x) {
    const int64_t begin = block * kSquaresBlock;
    const int64_t end = begin + kSquaresBlock < numel ? begin + kSquaresBlock : numel;
    double sum = 0.0;
#pragma unroll 8
    for (int64_t i = begin + lane; i < end; i += kSquaresLanes) {
      const double wide = to_float<kType>(static_cast<const Element*>(x)[i]);
      sum = __fma_rn(wide, wide, sum);
    }
    if (lane >= kSquaresLanes / 2) upper[lane - kSquaresLanes / 2] = sum;
    __syncthreads();
    if (lane < kSquaresLanes / 2) {
      sum = __dadd_rn(sum, upper[lane]);
      // Lanes from s on add values that no lane reads.
      for (int s = kSquaresLanes / 4; s > 0; s /= 2) sum = __dadd_rn(sum, __shfl_down_sync(0xffffffffu, sum, s));
      if (lane == 0) partials[block] = sum == sum ? sum : __longlong_as_double(0x7ff8000000000000ll);
    }
    __syncthreads();
  }
}
static_assert(kSquaresLanes == 64, "the accumulate in squares() takes two warps");

// One thread block per range, thread l for lane l, in the order of `WideSum`.
__global__ void __launch_bounds__(kSumLanes)
    add_up_partials(const double* partials, const PartialsRange* ranges, WideSum* sums) {
  const int lane = static_cast<int>(threadIdx.x);
  const PartialsRange range = ranges[blockIdx.x];
  __shared__ double high[kSumLanes];
  __shared__ double low[kSumLanes];
  WideSum sum;
#pragma unroll 8
  for (int64_t i = lane; i < range.count; i += kSumLanes) sum.add(partials[range.first + i]);
  for (int s = kSumLanes / 2; s > 0; s /= 2) {
    high[lane] = sum.high;
    low[lane] = sum.low;
    __syncthreads();
    if (lane < s) sum.add(WideSum{high[lane + s], low[lane + s]});
    __syncthreads();
  }
  if (lane == 0) sums[blockIdx.x] = sum;
}

}  // namespace

void cast_from_float(const float* in, void* out, DType out_dtype, int64_t numel, cudaStream_t stream) {
  const bool aligned = is_aligned(in, 16) && is_aligned(out, kFloatPack * element_size(out_dtype));
  with_dtype(out_dtype, [&](auto type) {
    const CastBody<DType::kFloat32, decltype(type)::value> body{in, out};
    launch<kFloatPack>("cast_from_float", body, aligned, numel, stream);
  });
}

void cast_to_float(const void* in, DType in_dtype, float* out, int64_t numel, cudaStream_t stream) {
  const bool aligned = is_aligned(in, kFloatPack * element_size(in_dtype)) && is_aligned(out, 16);
  with_dtype(in_dtype, [&](auto type) {
    const CastBody<decltype(type)::value, DType::kFloat32> body{in, out};
    launch<kFloatPack>("cast_to_float", body, aligned, numel, stream);
  });
}

void scale(float* values, float factor, int64_t numel, cudaStream_t stream) {
  launch<kFloatPack>("scale", ScaleBody{values, factor}, is_aligned(values, 16), numel, stream);
}

void add(void* sum, const void* x, DType dtype, int64_t numel, cudaStream_t stream) {
  const bool aligned = is_aligned(sum, 16) && is_aligned(x, 16);
  with_dtype(dtype, [&](auto type) {
    constexpr DType kType = decltype(type)::value;
    constexpr int kPack = static_cast<int>(16 / sizeof(typename Storage<kType>::Element));
    launch<kPack>("add", AddBody<kType, kType>{sum, x}, aligned, numel, stream);
  });
}

void add_to_float(float* sum, const void* x, DType x_dtype, int64_t numel, cudaStream_t stream) {
  const bool aligned = is_aligned(sum, 16) && is_aligned(x, kFloatPack * element_size(x_dtype));
  with_dtype(x_dtype, [&](auto type) {
    const AddBody<DType::kFloat32, decltype(type)::value> body{sum, x};
    launch<kFloatPack>("add_to_float", body, aligned, numel, stream);
  });
}

void sum_squares(const void* x, DType dtype, int64_t numel, double* partials, cudaStream_t stream) {
  if (numel <= 0) return;
  const unsigned blocks = num_blocks(num_square_partials(numel), 1);
  with_dtype(dtype, [&](auto type) {
    squares<decltype(type)::value><<<blocks, kSquaresLanes, 0, stream>>>(x, numel, partials);
    check_launch("sum_squares", numel);
  });
}

void add_up(const double* partials, const PartialsRange* ranges, int64_t num_ranges, WideSum* sums,
            cudaStream_t stream) {
  if (num_ranges <= 0) return;
  add_up_partials<<<static_cast<unsigned>(num_ranges), kSumLanes, 0, stream>>>(partials, ranges, sums);
  check_launch("add_up", num_ranges);
}

}  // namespace patrickstar::optim::cuda
