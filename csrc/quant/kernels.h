// Quantisation kernels of frozen parameters. Every implementation (scalar, AVX2, AVX-512, CUDA) gives the same bits.
// Each arithmetic step below is one correctly rounded IEEE-754 binary32 operation in the order written. Casts to 16
// bits round to nearest even.
//
// NF4 (Dettmers et al. 2023, "QLoRA", arXiv 2305.14314; quantize_4bit and dequantize_4bit of bitsandbytes with
// compress_statistics): 16 quantiles of the normal distribution, scaled by the largest magnitude of each block of
// kNf4Block elements, counted from the parameter's first.
//
//   absmax = largest magnitude in the block;  inverse = 1 / max(absmax, 1e-38)
//   code   = number of kNf4Bounds below x * inverse
//   byte   = code of element 2i in the upper four bits, of element 2i + 1 in the lower
//
// The scales are quantised in turn by the signed 8-bit dynamic map, in blocks of kNf4ScaleBlock:
//
//   offset = mean of the parameter's absmax     a sum in binary64 in the order of blocks, rounded once
//   d      = absmax - offset;  scale = largest |d|;  inverse = 1 / max(scale, 1e-38)
//   code8  = number of the map's bounds below d * inverse
//
//   x = nf4[code] * (map[code8] * scale + offset)
//
// 0.5159 bytes per element. Two differences from bitsandbytes: it takes the mean in binary32, whose last bit depends on
// threads and device; its CPU kernel misses the nearest code8 in one of 700. All other bits agree
// (tests/quant/formulas.py).
//
// int8: the weights of LLM.int8 (Dettmers et al. 2022, arXiv 2208.07339; int8_vectorwise_quant and
// int8_vectorwise_dequant of bitsandbytes), with blocks of kInt8Block elements instead of rows. A scale then depends on
// few elements, whatever the weight's shape.
//
//   absmax = largest magnitude in the block;  inverse = 127 / absmax, or 0 if absmax is 0
//   code   = round(x * inverse), to nearest even
//
//   x = (code * absmax) * (1 / 127)
//
// 1.0156 bytes per element.
//
// All functions take raw pointers, allocate nothing, throw nothing, and may run on any thread on disjoint ranges. A
// range begins with a block; its last block may be shorter.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/quantized.h"

namespace patrickstar::quant {

// The functions of one ISA.
struct CpuKernels {
  const char* isa;
  // absmax[b] of each block; not finite if an element is not.
  void (*absmax)(const float* in, int64_t numel, int64_t block, float* absmax);
  void (*encode_nf4)(const float* in, int64_t numel, const float* absmax, uint8_t* codes);
  void (*encode_int8)(const float* in, int64_t numel, const float* absmax, uint8_t* codes);
  // The float32 scales of `count` blocks from the parameter's block `first` on. `scales` begin at the parameter's
  // first.
  void (*expand_scales)(const uint8_t* block_scales, const float* scales, float offset, int64_t first, int64_t count,
                        float* out);
  // `scales`: one float32 per block.
  void (*decode_nf4)(const uint8_t* codes, const float* scales, int64_t numel, DType dtype, void* out);
  void (*decode_int8)(const uint8_t* codes, const float* scales, int64_t numel, DType dtype, void* out);
};

// The table of `isa`; null if it is unknown or not supported by this processor.
const CpuKernels* cpu_kernels_named(const char* isa);

extern const CpuKernels kScalarKernels;
#if defined(__x86_64__)
extern const CpuKernels kAvx2Kernels;
extern const CpuKernels kAvx512Kernels;
#endif

}  // namespace patrickstar::quant
