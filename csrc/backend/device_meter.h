// The simulated device's memory: a limit, and what is in use. Everything on the CPU that PyTorch
// allocates while an engine is open counts as the tide; slots count beside it.
//
// `MeteredAllocator` stands in front of PyTorch's CPU allocator (c10::SetCPUAllocator, the interface that
// c10 has for this) while it lives. c10's memory-reporting hook was tried first: it reports after the
// allocation instead of before it, misses what other threads free, and torch.profiler refuses to start
// while it is installed.
//
// Counters are atomic: any thread allocates and frees, also after the engine is closed.
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

  // Asks for room for an allocation of the tide: lets the handler evict, then throws
  // c10::OutOfMemoryError or, when measuring, lets it pass.
  void make_room_for_tide(int64_t num_bytes);
  void add_tide(int64_t num_bytes);
  void subtract_tide(int64_t num_bytes) { tide_ -= num_bytes; }

  // False, and nothing added, when the slot does not fit.
  bool try_add_slot(int64_t num_bytes);
  void add_slot_over_limit(int64_t num_bytes);
  void subtract_slot(int64_t num_bytes) { slots_ -= num_bytes; }

  // As if slots of so many bytes, and no others, were in use now.
  void note_needed_payloads(int64_t num_bytes);

  int64_t in_use() const { return tide_ + slots_; }

  const int64_t limit_;
  std::atomic<int64_t> tide_{0};
  std::atomic<int64_t> slots_{0};
  std::atomic<int64_t> tide_peak_{0};
  std::atomic<int64_t> live_peak_{0};  // the same, since somebody else has asked
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

// Allocations of this thread do not count while it lives: host memory in the sense of the user
// (state_dict and other copies of parameters handed out).
class HostAllocationScope {
 public:
  HostAllocationScope();
  ~HostAllocationScope();
};

}  // namespace patrickstar
