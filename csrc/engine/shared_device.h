// A device, and the host beside it, as the engines of one process share them.
//
// [Note: engines of one process] PyTorch has one allocator for a device, and a process one host memory. So engines that
// are open at the same time (teacher and student, policy and reference, two adversaries) share the budgets, the
// threads, the queues and one lock; chunks, plans and counters are each engine's own. The first one that is opened
// makes the device, the last one that is closed destroys it. An engine that finds no room takes it where it is missed
// least: slots that hold nothing, values of engines that run no forward and no backward, its own by its plan, and
// optimizer states last.
//
//   const std::shared_ptr<SharedDevice> device = SharedDevice::open(options);
//   device->join(pager);    // asked for memory from now on
//   device->leave(pager);
//
// Any thread may call open() and find(); the rest is guarded by the lock.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "backend/backend.h"
#include "backend/delaying_backend.h"
#include "common/host_threads.h"
#include "common/process_fork.h"
#include "common/thread_pool.h"
#include "memory/host_arena.h"
#include "optim/compute.h"
#include "quant/compute.h"

namespace patrickstar {

struct DeviceOptions {
  int cuda_device = -1;  // -1: the simulated device
  int64_t device_limit_bytes = kUnlimited;
  int64_t host_limit_bytes = kUnlimited;
  int64_t limit_rounding_bytes = 0;  // what PyTorch's CUDA allocator may take beyond a limit that it is given
  int64_t left_by_tide_bytes = 0;    // on the simulated device (make_cpu_backend), for tests
  bool follows_tide = true;          // likewise; false: as on CUDA (Backend::follows_tide)
  HostThreadOptions host_threads;
  DelayOptions delays;
};

// What vacating the device concerns.
enum class Vacate : uint8_t {
  kValues,      // compute copies and gradients, which come and go anyway
  kEverything,  // optimizer states as well, which then stay on the host
};

// An engine, as those see it who need device memory.
class Tenant {
 public:
  virtual ~Tenant() = default;
  // Slots that hold nothing go back to the device. Returns the bytes that they had, as does the next.
  virtual int64_t trim(int64_t num_bytes) = 0;
  // Arrays that can leave the device make room, those first that are used last.
  virtual int64_t give_up(int64_t num_bytes, Vacate what) = 0;
  // Whether it is in a forward or a backward.
  virtual bool is_running() const = 0;
  // Its optimizer states on the device, and the compute copies of all its chunks.
  virtual int64_t state_bytes() const = 0;
  virtual int64_t value_bytes() const = 0;
};

// What the engines have left of the device to one of them.
struct OthersBytes {
  int64_t states = 0;
  int64_t values = 0;
};

class SharedDevice final : public PressureHandler {
 public:
  using Lock = std::recursive_timed_mutex;

  // The one that other engines of this process have open, or a new one. Throws ArgumentError when theirs has other
  // budgets, and StateError, as find() does, in a fork of a process that has one.
  static std::shared_ptr<SharedDevice> open(const DeviceOptions& options);
  // The open one, if there is one in this process.
  static std::shared_ptr<SharedDevice> find(int cuda_device);

  explicit SharedDevice(const DeviceOptions& options);
  ~SharedDevice() override;
  SharedDevice(const SharedDevice&) = delete;
  SharedDevice& operator=(const SharedDevice&) = delete;

  const DeviceOptions& options() const { return options_; }
  bool is_cuda() const { return options_.cuda_device >= 0; }
  // It may outlive the device, with an engine that is closed.
  const std::shared_ptr<Lock>& lock() const { return lock_; }
  Backend& backend() { return *backend_; }
  ThreadPool& pool() { return pool_; }
  optim::HostCompute& host_compute() { return *host_compute_; }
  // The same on the simulated device.
  optim::Compute& device_compute() {
    if (cuda_compute_) return *cuda_compute_;
    return *host_compute_;
  }
  // Of quantised values, likewise.
  quant::HostCompute& host_quantizer() { return *host_quantizer_; }
  quant::Compute& device_quantizer() {
    if (cuda_quantizer_) return *cuda_quantizer_;
    return *host_quantizer_;
  }
  // An arena whose regions are spread over the NUMA nodes, touched by all threads and fit for transfers.
  std::unique_ptr<HostArena> make_arena();
  // Over which pages are spread; none where they lie as they are touched.
  const std::vector<int>& interleaved_nodes() const { return interleaved_nodes_; }

  void join(Tenant& tenant);
  void leave(Tenant& tenant);
  OthersBytes others_bytes(const Tenant& asking) const;
  // Room that tenants but `asking` make, those first that do not run; bytes.
  int64_t take_from_others(const Tenant& asking, int64_t num_bytes, Vacate what);
  // The highest tide since the tenant asked last.
  int64_t take_tide_peak(const Tenant& reader);

  int64_t release_device_memory(int64_t num_bytes) override;

 private:
  struct Joined {
    Tenant* tenant;
    int64_t tide_peak = 0;  // seen by others since it asked last
  };

  void check_same(const DeviceOptions& options) const;

  const ProcessFork made_in_ = ProcessFork::current();
  const DeviceOptions options_;
  const std::shared_ptr<Lock> lock_ = std::make_shared<Lock>();
  const std::unique_ptr<Backend> backend_;
  const HostThreads host_threads_;
  ThreadPool pool_;
  const std::unique_ptr<optim::HostCompute> host_compute_;
  const std::unique_ptr<optim::Compute> cuda_compute_;  // null on the simulated device
  const std::unique_ptr<quant::HostCompute> host_quantizer_;
  const std::unique_ptr<quant::Compute> cuda_quantizer_;  // null on the simulated device
  const std::vector<int> interleaved_nodes_;
  const std::shared_ptr<HostBudget> host_budget_;
  std::vector<Joined> tenants_;
};

}  // namespace patrickstar
