// Quantises and dequantises frozen parameters on the host's thread pool or on the device's compute queue. Both give the
// same bits (kernels.h). Host calls return when the work is done, device calls when it is enqueued. On the simulated
// device one object serves both.
#pragma once

#include <memory>
#include <vector>

#include "common/thread_pool.h"
#include "quant/kernels.h"

namespace patrickstar::quant {

struct DequantizeJob {
  QuantizedPart from;
  void* out;
  DType dtype;
};

class Compute {
 public:
  virtual ~Compute() = default;
  virtual void dequantize(const std::vector<DequantizeJob>& jobs) = 0;
};

// Operations for host memory only.
class HostCompute : public Compute {
 public:
  // `in` holds the whole parameter, because the scales of a part depend on the whole; only the values of `to` are
  // stored. Throws ArgumentError if a value is not finite.
  virtual void quantize(const float* in, int64_t numel, const QuantizedPart& to) = 0;
};

// `pool` must outlive the result. `isa` must be supported by this processor; null: the chosen one.
std::unique_ptr<HostCompute> make_host_compute(ThreadPool& pool, const char* isa = nullptr);
#ifdef PATRICKSTAR_WITH_CUDA
// Runs on PyTorch's current stream of `device`.
std::unique_ptr<Compute> make_cuda_compute(int device);
#endif

}  // namespace patrickstar::quant
