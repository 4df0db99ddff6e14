#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>

#include "common/check.h"
#include "common/isa.h"
#include "quant/compute.h"
#include "quant/maps.h"

namespace patrickstar::quant {

namespace {

constexpr int64_t kGrain = kNf4SuperBlock;  // elements: whole blocks of either type
static_assert(kGrain % kInt8Block == 0);

uint8_t dynamic_code(float x) {
  const float* const bounds = kDynamicMap.bounds;
  return static_cast<uint8_t>(std::lower_bound(bounds, bounds + 255, x) - bounds);
}

class PoolCompute final : public HostCompute {
 public:
  PoolCompute(ThreadPool& pool, const CpuKernels& kernels) : pool_(pool), kernels_(kernels) {}

  void quantize(const float* in, int64_t numel, const QuantizedPart& to) override {
    const bool nf4 = to.type == QuantType::kNf4;
    const int64_t block = nf4 ? kNf4Block : kInt8Block;
    std::vector<float> absmax(static_cast<size_t>(num_quant_blocks(numel, block)));
    pool_.parallel_for(numel, kGrain, [&](int64_t begin, int64_t end) {
      kernels_.absmax(in + begin, end - begin, block, absmax.data() + begin / block);
    });
    const bool finite = std::all_of(absmax.begin(), absmax.end(), [](float x) { return std::isfinite(x); });
    PS_CHECK(finite, ArgumentError, "a value that is to be quantised is NaN or infinite; mend the weights, or leave ",
             "this parameter out of quantisation (skip_modules)");
    const float* const own = absmax.data() + to.first / block;
    pool_.parallel_for(to.numel, kGrain, [&](int64_t begin, int64_t end) {
      const auto encode = nf4 ? kernels_.encode_nf4 : kernels_.encode_int8;
      encode(in + to.first + begin, end - begin, own + begin / block, to.codes + code_bytes(to.type, begin));
    });
    if (nf4) return quantize_scales(absmax, to);
    std::memcpy(to.scales, own, static_cast<size_t>(num_quant_blocks(to.numel, block)) * sizeof(float));
  }

  void dequantize(const std::vector<DequantizeJob>& jobs) override {
    for (const DequantizeJob& job : jobs) {
      pool_.parallel_for(job.from.numel, kGrain, [&](int64_t begin, int64_t end) { decode(job, begin, end); });
    }
  }

 private:
  void quantize_scales(const std::vector<float>& absmax, const QuantizedPart& to) {
    double sum = 0;
    for (float x : absmax) sum += static_cast<double>(x);
    *to.offset = static_cast<float>(sum / static_cast<double>(absmax.size()));
    const float offset = *to.offset;
    const auto count = static_cast<int64_t>(absmax.size());
    const int64_t own_begin = to.first / kNf4Block;
    const int64_t own_end = own_begin + num_quant_blocks(to.numel, kNf4Block);
    pool_.parallel_for(num_quant_blocks(count, kNf4ScaleBlock), 1, [&](int64_t first, int64_t last) {
      for (int64_t b = first; b < last; ++b) {
        const int64_t begin = b * kNf4ScaleBlock;
        const int64_t end = std::min(begin + kNf4ScaleBlock, count);
        float scale = 0;
        for (int64_t i = begin; i < end; ++i)
          scale = std::max(scale, std::fabs(absmax[static_cast<size_t>(i)] - offset));
        to.scales[b] = scale;
        const float inverse = 1.0f / std::max(scale, kLeastAbsmax);
        for (int64_t i = std::max(begin, own_begin); i < std::min(end, own_end); ++i) {
          to.block_scales[i - own_begin] = dynamic_code((absmax[static_cast<size_t>(i)] - offset) * inverse);
        }
      }
    });
  }

  void decode(const DequantizeJob& job, int64_t begin, int64_t end) const {
    const QuantizedPart& from = job.from;
    void* const out = element_at(job.out, begin, job.dtype);
    const uint8_t* const codes = from.codes + code_bytes(from.type, begin);
    if (from.type == QuantType::kInt8) {
      return kernels_.decode_int8(codes, from.scales + begin / kInt8Block, end - begin, job.dtype, out);
    }
    for (int64_t i = begin; i < end; i += kGrain) {
      const int64_t numel = std::min(kGrain, end - i);
      float scales[kGrain / kNf4Block];
      kernels_.expand_scales(from.block_scales + i / kNf4Block, from.scales, *from.offset, (from.first + i) / kNf4Block,
                             num_quant_blocks(numel, kNf4Block), scales);
      kernels_.decode_nf4(from.codes + i / 2, scales, numel, job.dtype, element_at(job.out, i, job.dtype));
    }
  }

  ThreadPool& pool_;
  const CpuKernels& kernels_;
};

}  // namespace

const CpuKernels* cpu_kernels_named(const char* isa) {
  if (!has_isa(isa)) return nullptr;
#if defined(__x86_64__)
  if (std::strcmp(isa, "avx2") == 0) return &kAvx2Kernels;
  if (std::strcmp(isa, "avx512") == 0) return &kAvx512Kernels;
#endif
  return &kScalarKernels;
}

std::unique_ptr<HostCompute> make_host_compute(ThreadPool& pool, const char* isa) {
  const CpuKernels* const kernels = cpu_kernels_named(isa == nullptr ? chosen_isa() : isa);
  PS_CHECK(kernels != nullptr, ArgumentError, "isa is \"", isa,
           "\", which this processor lacks; pass one of those that ", "optim.supported_isas() gives");
  return std::make_unique<PoolCompute>(pool, *kernels);
}

}  // namespace patrickstar::quant
