// The leaf kernels of quantised frozen values. Every implementation (scalar, AVX2, AVX-512, CUDA) gives the same bits.
//
// Each arithmetic step below is one correctly rounded IEEE-754 binary32 operation, in the order written; casts to 16
// bits round to nearest even.
//
// [Note: NF4] As published (Dettmers et al. 2023, "QLoRA", arXiv 2305.14314) and as bitsandbytes computes it
// (quantize_4bit and dequantize_4bit with compress_statistics): 16 quantiles of the normal distribution, scaled by the
// largest magnitude of each block of kNf4Block elements, counted from the parameter's first one.
//
//   absmax = largest magnitude in the block;  inverse = 1 / max(absmax, 1e-38)
//   code   = how many of kNf4Bounds are below x * inverse
//   byte   = code of element 2i in the upper four bits, of element 2i + 1 in the lower
//
// The scales are quantised in turn, in blocks of kNf4ScaleBlock of them, by the signed dynamic map of 8 bits:
//
//   offset = mean of the parameter's absmax     a sum in binary64 in the order of blocks, rounded once
//   d      = absmax - offset;  scale = largest |d|;  inverse = 1 / max(scale, 1e-38)
//   code8  = how many of the map's bounds are below d * inverse
//
//   x = nf4[code] * (map[code8] * scale + offset)
//
// That is 0.5159 bytes per element. (bitsandbytes takes the mean in binary32, whose last bit depends on threads and
// device, and its CPU kernel misses the nearest code8 in one of 700; else all bits are its, tests/quant/formulas.py.)
//
// [Note: int8] The formulas of LLM.int8's weights (Dettmers et al. 2022, arXiv 2208.07339; int8_vectorwise_quant and
// int8_vectorwise_dequant of bitsandbytes), with blocks of kInt8Block elements in the place of rows: a block's scale
// depends on its own elements alone, whatever shape a weight has, and has fewer of them to serve.
//
//   absmax = largest magnitude in the block;  inverse = 127 / absmax, or 0 where absmax is
//   code   = round(x * inverse), to nearest even
//
//   x = (code * absmax) * (1 / 127)
//
// That is 1.0156 bytes per element.
//
// All functions take raw pointers, allocate nothing, throw nothing, and may be called from any thread on disjoint
// ranges, which begin with a block; the last block of a range may be shorter.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/quantized.h"

namespace patrickstar::quant {

// One ISA's functions.
struct CpuKernels {
  const char* isa;
  // absmax[b] of each block; one that is no finite number where an element is none.
  void (*absmax)(const float* in, int64_t numel, int64_t block, float* absmax);
  void (*encode_nf4)(const float* in, int64_t numel, const float* absmax, uint8_t* codes);
  void (*encode_int8)(const float* in, int64_t numel, const float* absmax, uint8_t* codes);
  // The scales of `count` blocks, of which the first one is the `first`-th of the parameter; `scales` are its own.
  void (*expand_scales)(const uint8_t* block_scales, const float* scales, float offset, int64_t first, int64_t count,
                        float* out);
  // `scales`: of each block, as float32.
  void (*decode_nf4)(const uint8_t* codes, const float* scales, int64_t numel, DType dtype, void* out);
  void (*decode_int8)(const uint8_t* codes, const float* scales, int64_t numel, DType dtype, void* out);
};

// A given ISA's table, or null when it is unknown or this processor lacks it.
const CpuKernels* cpu_kernels_named(const char* isa);

extern const CpuKernels kScalarKernels;
#if defined(__x86_64__)
extern const CpuKernels kAvx2Kernels;
extern const CpuKernels kAvx512Kernels;
#endif

}  // namespace patrickstar::quant
