// Memory accounting of the simulated device: a limit, device buffers and activation memory. All memory that PyTorch
// allocates on the CPU while an engine is open counts as activation memory.
//
// `MeteredAllocator` replaces PyTorch's CPU allocator (c10::SetCPUAllocator) while it exists. c10's memory-reporting
// hook does not serve: it reports after the allocation, misses memory freed by other threads, and blocks
// torch.profiler.
//
// Counters are atomic. Any thread allocates and frees, also after the engine is closed.
#pragma once

#include <c10/core/Allocator.h>

#include <atomic>
#include <cstdint>
#include <memory>

#include "backend/backend.h"
#include "common/process_fork.h"

namespace patrickstar {

class DeviceMeter {
 public:
  explicit DeviceMeter(int64_t limit_bytes) : limit_(limit_bytes) {}

  // Makes room for an allocation of activations: lets the handler evict chunks, then throws c10::OutOfMemoryError
  // unless the policy is kMeasure.
  void make_room_for_activation_memory(int64_t num_bytes);
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

class MeteredAllocator final : public c10::Allocator {
 public:
  explicit MeteredAllocator(std::shared_ptr<DeviceMeter> meter);
  ~MeteredAllocator() override;

  c10::DataPtr allocate(size_t num_bytes) override;
  c10::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* to, const void* from, std::size_t count) const override;

 private:
  const ProcessFork made_in_ = ProcessFork::current();
  std::shared_ptr<DeviceMeter> meter_;
  c10::Allocator* base_;
};

// Allocations of the calling thread count as host memory while the scope exists: state_dict and other copies handed to
// the user.
class HostAllocationScope {
 public:
  HostAllocationScope();
  ~HostAllocationScope();
};

}  // namespace patrickstar
