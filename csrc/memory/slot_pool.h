// Device slots: the blocks of device memory that payloads occupy.
//
// A slot that is given back stays here for reuse (its last users' events go with it, so that reuse needs no host
// synchronisation) until somebody needs the memory for something else. The one that was released first is reused first.
// Slots count against the device limit whether in use or idle. Guarded by the runtime's lock.
//
// [Note: rare sizes] Idle slots go back in the order of how many slots have their size, those of the most common size
// first: another such slot is free soon, but one of a rare size (a language model's head) can be had again only where
// PyTorch finds as much memory in one piece. On CUDA it gave all that it had cached back to the driver for it, in
// every step, while the device stood still for 0.13 s. For the same reason a slot that is up to a half larger serves
// a request where there is no room for another one: in the end all slots of common sizes are large enough for each
// other. Plans leave slots of rare sizes their room at all moments (idle_slot_bytes(), plan/placement.cpp).
#pragma once

#include <cstdint>
#include <map>
#include <utility>

#include "common/device_allocator.h"
#include "common/event.h"

namespace patrickstar {

class SlotOwner {
 public:
  virtual void take_back(void* data, int64_t num_bytes, BusyUntil busy) noexcept = 0;

 protected:
  ~SlotOwner() = default;
};

// [Note: who frees what] (docs/design.md) Device memory; null, or owned: it goes back to where it came from, which
// outlives it, when it is destroyed. Until `busy` is over somebody may use what it held; its owner keeps that in mind.
class Slot {
 public:
  Slot() = default;
  Slot(SlotOwner& owner, void* data, int64_t num_bytes, BusyUntil busy)
      : data(data), num_bytes(num_bytes), busy(std::move(busy)), owner_(&owner) {}
  ~Slot() { reset(); }
  Slot(Slot&& other) noexcept { swap(other); }
  Slot& operator=(Slot&& other) noexcept {
    Slot(std::move(other)).swap(*this);
    return *this;
  }
  Slot(const Slot&) = delete;
  Slot& operator=(const Slot&) = delete;

  explicit operator bool() const { return data != nullptr; }
  bool belongs_to(const SlotOwner& owner) const { return owner_ == &owner; }
  void reset() {
    if (data != nullptr)
      owner_->take_back(std::exchange(data, nullptr), std::exchange(num_bytes, 0), std::exchange(busy, {}));
  }
  void swap(Slot& other) noexcept {
    std::swap(data, other.data);
    std::swap(num_bytes, other.num_bytes);
    std::swap(busy, other.busy);
    std::swap(owner_, other.owner_);
  }

  void* data = nullptr;
  int64_t num_bytes = 0;
  BusyUntil busy;

 private:
  SlotOwner* owner_ = nullptr;
};

enum class OverLimit { kRefuse, kAllow };

// [Note: what stays fits] Whether a slot may be larger than what is asked for. What comes and goes takes whatever is
// idle, so that memory need not change hands; but what stays for good (optimizer states, which are of other sizes than
// values) would keep what it does not need for good: up to a third of all memory of states of 8 bits.
enum class SlotFit : uint8_t { kLoose, kExact };

// What a slot may be larger than what is asked for, as a share of that, where there is no room for a slot of its own.
constexpr double kMostSlotWaste = 0.5;

class SlotPool final : public SlotOwner {
 public:
  // An idle slot serves a request if it is larger by at most this share of it, by more where memory is scarce; 0 asks
  // for the very size.
  SlotPool(DeviceAllocator& allocator, double max_waste_ratio)
      : allocator_(allocator), max_waste_ratio_(max_waste_ratio) {}
  // All slots are gone.
  ~SlotPool() { trim(INT64_MAX); }
  SlotPool(const SlotPool&) = delete;
  SlotPool& operator=(const SlotPool&) = delete;

  // While slots take no more than this, a new one is preferred to an idle one whose last use is not over: whoever
  // writes it would have to wait.
  void set_ample_bytes(int64_t num_bytes) { ample_bytes_ = num_bytes; }

  // An empty slot when there is no room.
  Slot acquire(int64_t num_bytes, SlotFit fit = SlotFit::kLoose, OverLimit over_limit = OverLimit::kRefuse);
  // Gives idle slots back to the allocator until at least `num_bytes` are freed or none is idle; rare sizes last.
  int64_t trim(int64_t num_bytes);

  int64_t used_bytes() const { return used_bytes_; }
  int64_t idle_bytes() const { return idle_bytes_; }

 private:
  struct Idle {
    void* data;
    BusyUntil busy;
  };

  using IdleSlots = std::multimap<int64_t, Idle>;  // by size

  // The smallest that is large enough, and not larger by more than this share.
  IdleSlots::iterator find_idle(int64_t num_bytes, double waste_ratio);
  Slot hand_out_idle(IdleSlots::iterator found);
  Slot hand_out(void* data, int64_t num_bytes, BusyUntil busy);
  // Where there is no memory to note it, it goes back to the allocator.
  void take_back(void* data, int64_t num_bytes, BusyUntil busy) noexcept override;
  void forget_one(int64_t size);
  // Of the idle slots, of which there are some: one of the most common size, the larger of two.
  IdleSlots::iterator most_common();

  DeviceAllocator& allocator_;
  double max_waste_ratio_;
  IdleSlots idle_;
  std::map<int64_t, int> num_of_size_;  // slots, in use or idle
  int64_t used_bytes_ = 0;
  int64_t idle_bytes_ = 0;
  int64_t ample_bytes_ = 0;
};

}  // namespace patrickstar
