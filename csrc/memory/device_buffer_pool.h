// Pool of device buffers for chunks.
//
// A released buffer stays in the pool with the events of its last users, so reuse needs no host synchronisation. Of
// equal sizes, the first released is reused first. Used and idle buffers count against the device limit. Guarded by the
// runtime's lock.
//
// Rare sizes. trim() frees idle buffers of the most common size first, and rare sizes (a language model's head) last.
// To allocate a rare size again, PyTorch needs that much memory in one piece. On CUDA it returned its whole cache to
// the driver in every step for it, which stalled the device for 0.13 s (benchmark/results/h200-allocator-room.txt). For
// the same reason a buffer up to kMostDeviceBufferWaste too large serves a request when memory is scarce, so buffers of
// common sizes become interchangeable. Plans keep room for rare sizes at every access (idle_device_buffer_bytes(),
// plan/placement.cpp).
#pragma once

#include <cstdint>
#include <map>
#include <utility>

#include "common/device_allocator.h"
#include "common/event.h"

namespace patrickstar {

class DeviceBufferOwner {
 public:
  virtual void take_back(void* data, int64_t num_bytes, BusyUntil busy) noexcept = 0;

 protected:
  ~DeviceBufferOwner() = default;
};

// Owned device memory, or null. It returns to its owner when destroyed; the owner must outlive it. Users of the old
// contents may run until `busy` is over, which the owner must respect.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  DeviceBuffer(DeviceBufferOwner& owner, void* data, int64_t num_bytes, BusyUntil busy)
      : data(data), num_bytes(num_bytes), busy(std::move(busy)), owner_(&owner) {}
  ~DeviceBuffer() { reset(); }
  DeviceBuffer(DeviceBuffer&& other) noexcept { swap(other); }
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept {
    DeviceBuffer(std::move(other)).swap(*this);
    return *this;
  }
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;

  explicit operator bool() const { return data != nullptr; }
  bool belongs_to(const DeviceBufferOwner& owner) const { return owner_ == &owner; }
  void reset() {
    if (data != nullptr)
      owner_->take_back(std::exchange(data, nullptr), std::exchange(num_bytes, 0), std::exchange(busy, {}));
  }
  void swap(DeviceBuffer& other) noexcept {
    std::swap(data, other.data);
    std::swap(num_bytes, other.num_bytes);
    std::swap(busy, other.busy);
    std::swap(owner_, other.owner_);
  }

  void* data = nullptr;
  int64_t num_bytes = 0;
  BusyUntil busy;

 private:
  DeviceBufferOwner* owner_ = nullptr;
};

enum class OverLimit { kRefuse, kAllow };

// kLoose: an idle buffer larger than the request may serve it, so memory need not change hands. kExact: for optimizer
// states, which stay: with loose fits a job with 8-bit states needs 3 % more device memory
// (benchmark/results/cpu-exact-device-buffers.txt).
enum class DeviceBufferFit : uint8_t { kLoose, kExact };

// Most excess size of a buffer, relative to the request, when there is no room for a new one. Not measured by itself.
constexpr double kMostDeviceBufferWaste = 0.5;

class DeviceBufferPool final : public DeviceBufferOwner {
 public:
  // `max_waste_ratio`: most excess size of an idle buffer, relative to the request, while memory is not scarce.
  DeviceBufferPool(DeviceAllocator& allocator, double max_waste_ratio)
      : allocator_(allocator), max_waste_ratio_(max_waste_ratio) {}
  // All buffers must be gone.
  ~DeviceBufferPool() { trim(INT64_MAX); }
  DeviceBufferPool(const DeviceBufferPool&) = delete;
  DeviceBufferPool& operator=(const DeviceBufferPool&) = delete;

  // While all buffers take at most this, acquire() prefers a new buffer to an idle one whose last use is not over.
  void set_ample_bytes(int64_t num_bytes) { ample_bytes_ = num_bytes; }

  // Empty if there is no room.
  DeviceBuffer acquire(int64_t num_bytes, DeviceBufferFit fit = DeviceBufferFit::kLoose,
                       OverLimit over_limit = OverLimit::kRefuse);
  // Frees idle buffers, rare sizes last, until `num_bytes` are freed or none is left. Returns the bytes freed.
  int64_t trim(int64_t num_bytes);

  int64_t used_bytes() const { return used_bytes_; }
  int64_t idle_bytes() const { return idle_bytes_; }

 private:
  struct Idle {
    void* data;
    BusyUntil busy;
  };

  using IdleDeviceBuffers = std::multimap<int64_t, Idle>;  // by size

  // The smallest idle buffer that fits within `waste_ratio`, or end().
  IdleDeviceBuffers::iterator find_idle(int64_t num_bytes, double waste_ratio);
  DeviceBuffer hand_out_idle(IdleDeviceBuffers::iterator found);
  DeviceBuffer hand_out(void* data, int64_t num_bytes, BusyUntil busy);
  // If bookkeeping finds no host memory, the buffer is freed.
  void take_back(void* data, int64_t num_bytes, BusyUntil busy) noexcept override;
  void forget_one(int64_t size);
  // An idle buffer of the most common size, the larger size on a tie. Requires an idle buffer.
  IdleDeviceBuffers::iterator most_common();

  DeviceAllocator& allocator_;
  double max_waste_ratio_;
  IdleDeviceBuffers idle_;
  std::map<int64_t, int> num_of_size_;  // number of buffers, used or idle
  int64_t used_bytes_ = 0;
  int64_t idle_bytes_ = 0;
  int64_t ample_bytes_ = 0;
};

}  // namespace patrickstar
