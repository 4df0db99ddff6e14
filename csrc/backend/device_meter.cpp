#include "backend/device_meter.h"

#include <pthread.h>

#include <array>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "common/check.h"
#include "common/sizes.h"
#include "torch_api/attached_torch.h"

namespace patrickstar {

namespace {

thread_local int host_scopes = 0;

void raise_to(std::atomic<int64_t>& maximum, int64_t value) {
  int64_t seen = maximum.load();
  while (seen < value && !maximum.compare_exchange_weak(seen, value)) {
  }
}

// A metered allocation. The entries lie in a table by address, not in a header or deleter context: oneDNN keeps
// addresses from c10's raw interface, which any CPU allocator of the process must be able to free. A deleter gets only
// an address, so there is one table per process.
struct Metered {
  int64_t num_bytes;
  std::shared_ptr<DeviceMeter> meter;
};

class MeteredTable {
 public:
  // Called before a fork: the child could never take a mutex that another thread holds.
  void lock_all() {
    for (Shard& shard : shards_) shard.mutex.lock();
  }
  void unlock_all() {
    for (Shard& shard : shards_) shard.mutex.unlock();
  }

  void insert(void* data, Metered metered) {
    Shard& shard = shard_of(data);
    const std::lock_guard<std::mutex> lock(shard.mutex);
    shard.entries.insert_or_assign(data, std::move(metered));
  }
  // Returns an empty entry if the address is not metered.
  Metered take(void* data) {
    Shard& shard = shard_of(data);
    const std::lock_guard<std::mutex> lock(shard.mutex);
    const auto found = shard.entries.find(data);
    if (found == shard.entries.end()) return {0, nullptr};
    Metered metered = std::move(found->second);
    shard.entries.erase(found);
    return metered;
  }

 private:
  struct Shard {
    std::mutex mutex;
    std::unordered_map<void*, Metered> entries;
  };
  Shard& shard_of(void* data) { return shards_[reinterpret_cast<uintptr_t>(data) / 64 % shards_.size()]; }

  std::array<Shard, 16> shards_;
};

// Leaked on purpose: tensors may be freed while the process exits.
MeteredTable& metered_table() {
  static auto* table = [] {
    auto* made = new MeteredTable;
    pthread_atfork([] { metered_table().lock_all(); }, [] { metered_table().unlock_all(); },
                   [] { metered_table().unlock_all(); });
    return made;
  }();
  return *table;
}

void note_freed(void* data) {
  const Metered metered = metered_table().take(data);
  if (metered.meter != nullptr) metered.meter->subtract_activation_memory(metered.num_bytes);
}

}  // namespace

void DeviceMeter::note_peaks() {
  if (policy_ == LimitPolicy::kLifted) return;
  raise_to(activation_peak_, activation_memory_);
  raise_to(live_peak_, activation_memory_);
  raise_to(peak_, in_use());
}

int64_t DeviceMeter::make_room_for_activation_memory(int64_t num_bytes) {
  if (limit_ == kUnlimited || policy_ == LimitPolicy::kLifted || in_use() + num_bytes <= limit_) return 0;
  pressure_.ask(in_use() + num_bytes - limit_);
  const int64_t need = in_use() + num_bytes;
  if (need <= limit_) return 0;
  if (policy_ != LimitPolicy::kMeasure) return need - limit_;
  raise_to(least_limit_, need);
  return 0;
}

void DeviceMeter::note_needed_chunk_buffers(int64_t num_bytes) {
  const int64_t need = activation_memory_ + num_bytes;
  if (policy_ == LimitPolicy::kMeasure && limit_ != kUnlimited && need > limit_) raise_to(least_limit_, need);
}

void DeviceMeter::add_activation_memory(int64_t num_bytes) {
  activation_memory_ += num_bytes;
  note_peaks();
}

bool DeviceMeter::try_add_device_buffer(int64_t num_bytes) {
  if (limit_ != kUnlimited && in_use() + num_bytes > limit_) return false;
  device_buffers_ += num_bytes;
  note_peaks();
  return true;
}

void DeviceMeter::add_device_buffer_over_limit(int64_t num_bytes) {
  device_buffers_ += num_bytes;
  raise_to(least_limit_, in_use());
  note_peaks();
}

CpuAllocatorMeter::CpuAllocatorMeter(std::shared_ptr<DeviceMeter> meter) : meter_(std::move(meter)) {
  const MeterInstalled outcome = torch_api().meter_cpu_memory(this, &note_freed);
  PS_CHECK(outcome != MeterInstalled::kNoRawDeleter, StateError,
           "PyTorch's CPU allocator was replaced by one without a raw deleter; "
           "PatrickStar cannot count its memory, so remove it to use the simulated device");
  PS_CHECK(outcome != MeterInstalled::kAnotherMeter, StateError,
           "another simulated device is open in this process; close its engine first");
}

CpuAllocatorMeter::~CpuAllocatorMeter() { torch_api().stop_metering(); }

// A forked process (a DataLoader worker) has no engine that could make room.
bool CpuAllocatorMeter::counts_this_thread() const { return host_scopes == 0 && made_in_.is_here(); }

const char* CpuAllocatorMeter::refusal(int64_t num_bytes) {
  if (meter_->make_room_for_activation_memory(num_bytes) == 0) return nullptr;
  const int64_t in_use = meter_->in_use();
  thread_local std::string message;
  message = detail::join("out of simulated device memory: ", show_exactly(num_bytes), " more are needed, ",
                         show_exactly(in_use), " of ", show_exactly(meter_->limit_),
                         " are in use by activations and by chunks that running operations hold; ",
                         kCheckpointOrSmallerBatch, ", or raise device_memory to at least ",
                         show_enough(in_use + num_bytes), "; later allocations may need more");
  return message.c_str();
}

void CpuAllocatorMeter::add(void* data, int64_t num_bytes) {
  metered_table().insert(data, {num_bytes, meter_});  // throws before anything is counted
  meter_->add_activation_memory(num_bytes);
}

HostAllocationScope::HostAllocationScope() { ++host_scopes; }
HostAllocationScope::~HostAllocationScope() { --host_scopes; }

}  // namespace patrickstar
