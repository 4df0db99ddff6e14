// Device memory that activations have left: where gradients wait for the norm.
//
// [Note: gradients in the tide] Activations need most at one moment, of a language model where its loss is computed.
// Towards the end of backward PyTorch's allocator keeps gigabytes of that which no layer asks for any more, cached for
// the compute queue, where no slot may be cut out ([Note: slots and the caching allocator], backend/cuda_backend.cpp):
// a slot would not be given back before the next forward. A gradient that waits on the device is: it comes as backward
// goes on, and is gone with the update. So where values are put in place ([Note: values in place], optim/kernels.h),
// which is where memory is scarcest and a gradient does not take its parameters' place, it lies there as far as there
// is room. It is no slot then: it belongs to the tide, which it does not raise, and plans reckon it as nothing
// (DeviceBudget::gradient_tide_bytes). That it leaves makes room for activations alone.
//
// A tide that leaves the device at once, as the simulated one does, leaves nothing behind: slots get that.
//
// Guarded by the engine's lock.
#pragma once

#include <cstdint>
#include <utility>

#include "common/device_allocator.h"
#include "memory/slot_pool.h"

namespace patrickstar {

class TideMemory final : public SlotOwner {
 public:
  explicit TideMemory(DeviceAllocator& allocator) : allocator_(allocator) {}
  TideMemory(const TideMemory&) = delete;
  TideMemory& operator=(const TideMemory&) = delete;

  // Empty where activations have not left so much.
  Slot acquire(int64_t num_bytes) {
    BusyUntil busy;
    void* data = allocator_.allocate_of_tide(num_bytes, busy);
    room_bytes_ = allocator_.lent_tide_bytes();
    return data == nullptr ? Slot() : Slot(*this, data, num_bytes, std::move(busy));
  }

  // What activations cannot have meanwhile.
  int64_t lent_bytes() const { return allocator_.lent_tide_bytes(); }
  // The same after the last acquire(): late in backward.
  int64_t room_bytes() const { return room_bytes_; }

 private:
  void take_back(void* data, int64_t num_bytes, BusyUntil busy) noexcept override {
    allocator_.free_of_tide(data, num_bytes, busy);
  }

  DeviceAllocator& allocator_;
  int64_t room_bytes_ = 0;
};

}  // namespace patrickstar
