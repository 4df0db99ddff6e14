// Device memory that activations have left, lent to gradients that wait for the norm.
//
// [Note: gradients in activation memory] Activation memory has one peak; for language models it is the loss. Late in
// backward PyTorch's allocator still caches gigabytes of that peak, which no layer needs until the next forward. A
// device buffer cut from this cache (backend/cuda_backend.cpp) would stay until then, so buffers come from another
// pool. A waiting gradient leaves with its update, so it may lie there. This is done for in-place speculative updates
// (optim/kernels.h), where memory is scarcest and a gradient does not take its parameters' place. Such a gradient
// counts as activation memory without raising its peak, and plans give it 0 bytes
// (DeviceBudget::gradient_activation_bytes). Evicting it frees memory that only activations can use.
//
// The simulated device's activation memory is freed at once, so it has nothing to lend.
//
// Guarded by the engine's lock.
#pragma once

#include <cstdint>
#include <utility>

#include "common/device_allocator.h"
#include "memory/device_buffer_pool.h"

namespace patrickstar {

class ActivationMemory final : public DeviceBufferOwner {
 public:
  explicit ActivationMemory(DeviceAllocator& allocator) : allocator_(allocator) {}
  ActivationMemory(const ActivationMemory&) = delete;
  ActivationMemory& operator=(const ActivationMemory&) = delete;

  // Empty if activations have not left that much.
  DeviceBuffer acquire(int64_t num_bytes) {
    BusyUntil busy;
    void* data = allocator_.allocate_for_activations(num_bytes, busy);
    room_bytes_ = allocator_.lent_activation_bytes();
    return data == nullptr ? DeviceBuffer() : DeviceBuffer(*this, data, num_bytes, std::move(busy));
  }

  // Bytes lent now, which activations cannot use.
  int64_t lent_bytes() const { return allocator_.lent_activation_bytes(); }
  // lent_bytes() after the last acquire(), late in backward.
  int64_t room_bytes() const { return room_bytes_; }

 private:
  void take_back(void* data, int64_t num_bytes, BusyUntil busy) noexcept override {
    allocator_.free_for_activations(data, num_bytes, busy);
  }

  DeviceAllocator& allocator_;
  int64_t room_bytes_ = 0;
};

}  // namespace patrickstar
