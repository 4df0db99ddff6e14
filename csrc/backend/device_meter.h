// Memory accounting of the simulated device: a limit, device buffers and activation memory. All memory that PyTorch
// allocates on the CPU while an engine is open counts as activation memory.
//
// `CpuAllocatorMeter` counts through an allocator in front of PyTorch's (csrc/torch_shim/shim.cpp). c10's
// memory-reporting hook does not serve: it reports after the allocation, misses memory freed by other threads, and
// blocks torch.profiler.
//
// Counters are atomic. Any thread allocates and frees, also after the engine is closed.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "backend/backend.h"
#include "common/process_fork.h"
#include "torch_api/torch_api.h"

namespace patrickstar {

class DeviceMeter {
 public:
  explicit DeviceMeter(int64_t limit_bytes) : limit_(limit_bytes) {}

  // Makes room for an allocation of activations: lets the handler evict chunks. Returns the bytes that it then needs
  // above the limit, 0 with the policy kMeasure.
  int64_t make_room_for_activation_memory(int64_t num_bytes);
  void add_activation_memory(int64_t num_bytes);
  void subtract_activation_memory(int64_t num_bytes) { activation_memory_ -= num_bytes; }

  // Returns false and adds nothing if the buffer does not fit.
  bool try_add_device_buffer(int64_t num_bytes);
  void add_device_buffer_over_limit(int64_t num_bytes);
  void subtract_device_buffer(int64_t num_bytes) { device_buffers_ -= num_bytes; }

  // Records the limit that would be needed if exactly `num_bytes` of device buffers were in use now.
  void note_needed_chunk_buffers(int64_t num_bytes);

  int64_t in_use() const { return activation_memory_ + device_buffers_; }

  const int64_t limit_;
  std::atomic<int64_t> activation_memory_{0};
  std::atomic<int64_t> device_buffers_{0};
  std::atomic<int64_t> activation_peak_{0};
  std::atomic<int64_t> live_peak_{0};  // since its own last reset
  std::atomic<int64_t> peak_{0};
  std::atomic<int64_t> least_limit_{0};
  std::atomic<LimitPolicy> policy_{LimitPolicy::kEnforce};
  PressureGate pressure_;

 private:
  void note_peaks();
};

// Counts the memory of PyTorch's CPU allocator as activations while it lives. At most one exists per process.
class CpuAllocatorMeter final : public CpuMemoryMeter {
 public:
  explicit CpuAllocatorMeter(std::shared_ptr<DeviceMeter> meter);
  ~CpuAllocatorMeter();
  CpuAllocatorMeter(const CpuAllocatorMeter&) = delete;
  CpuAllocatorMeter& operator=(const CpuAllocatorMeter&) = delete;

  bool counts_this_thread() const override;
  const char* refusal(int64_t num_bytes) override;
  void add(void* data, int64_t num_bytes) override;

 private:
  const ProcessFork made_in_ = ProcessFork::current();
  std::shared_ptr<DeviceMeter> meter_;
};

// Allocations of the calling thread count as host memory while the scope exists: state_dict and other copies handed to
// the user.
class HostAllocationScope {
 public:
  HostAllocationScope();
  ~HostAllocationScope();
};

}  // namespace patrickstar
