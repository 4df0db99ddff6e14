// A device and its host, shared by the engines of one process.
//
// Engines that are open at the same time (teacher and student, policy and reference) share budgets, threads, queues and
// one lock. Chunks, plans and counters belong to each engine. The first engine makes the device, the last one to close
// destroys it. An engine without room takes it in this order:
//
// - idle device buffers;
// - its own arrays beyond the limit on its chunk buffers;
// - values of other engines, first of those that run no forward or backward;
// - its own arrays, by its plan;
// - optimizer states.
//
//   const std::shared_ptr<SharedDevice> device = SharedDevice::open(options);
//   device->join(pager);    // may be asked for memory from now on
//   device->leave(pager);
//
// Any thread may call open() and find(); all else is guarded by the lock.
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
  int64_t limit_rounding_bytes = 0;       // bytes that PyTorch's CUDA allocator may take beyond its limit
  int64_t left_by_activations_bytes = 0;  // simulated device (make_cpu_backend), for tests
  bool follows_activations = true;  // simulated device, for tests; false: as on CUDA (Backend::follows_activations)
  HostThreadOptions host_threads;
  DelayOptions delays;
};

// Arrays that leave when memory is taken from an engine.
enum class EvictionScope : uint8_t {
  kValues,      // compute values and gradients, which come and go anyway
  kEverything,  // optimizer states as well, which then stay on the host
};

class MemoryClient {
 public:
  virtual ~MemoryClient() = default;
  // Returns idle device buffers to the device. Both calls return the bytes they freed.
  virtual int64_t trim(int64_t num_bytes) = 0;
  // Evicts arrays, those with the farthest next use first.
  virtual int64_t give_up(int64_t num_bytes, EvictionScope what) = 0;
  virtual bool is_running() const = 0;
  // Bytes of its optimizer states on the device, and of the compute values of all its chunks.
  virtual int64_t state_bytes() const = 0;
  virtual int64_t value_bytes() const = 0;
};

// Bytes of other engines: states on the device, and compute values of all chunks.
struct OthersBytes {
  int64_t states = 0;
  int64_t values = 0;
};

class SharedDevice final : public PressureHandler {
 public:
  using Lock = std::recursive_timed_mutex;

  // Opens the process's device, or shares the open one. Throws ArgumentError if its budgets differ, and, like find(),
  // StateError in a fork of a process that has one.
  static std::shared_ptr<SharedDevice> open(const DeviceOptions& options);
  // The process's open device; null if there is none.
  static std::shared_ptr<SharedDevice> find(int cuda_device);

  explicit SharedDevice(const DeviceOptions& options);
  ~SharedDevice() override;
  SharedDevice(const SharedDevice&) = delete;
  SharedDevice& operator=(const SharedDevice&) = delete;

  const DeviceOptions& options() const { return options_; }
  bool is_cuda() const { return options_.cuda_device >= 0; }
  // May outlive the device, in a closed engine.
  const std::shared_ptr<Lock>& lock() const { return lock_; }
  Backend& backend() { return *backend_; }
  ThreadPool& pool() { return pool_; }
  ThreadPriority host_priority() const { return host_threads_.priority; }
  optim::HostCompute& host_compute() { return *host_compute_; }
  // On the simulated device, host_compute().
  optim::Compute& device_compute() {
    if (cuda_compute_) return *cuda_compute_;
    return *host_compute_;
  }
  // Quantisation, chosen in the same way.
  quant::HostCompute& host_quantizer() { return *host_quantizer_; }
  quant::Compute& device_quantizer() {
    if (cuda_quantizer_) return *cuda_quantizer_;
    return *host_quantizer_;
  }
  // An arena whose regions are spread over the NUMA nodes, touched by all threads, and pinned on CUDA.
  std::unique_ptr<HostArena> make_arena();
  // NUMA nodes over which pages are interleaved; none: pages lie where they are first touched.
  const std::vector<int>& interleaved_nodes() const { return interleaved_nodes_; }

  void join(MemoryClient& memory_client);
  void leave(MemoryClient& memory_client);
  OthersBytes others_bytes(const MemoryClient& asking) const;
  // Frees room in other engines, idle ones first. Returns the bytes freed.
  int64_t take_from_others(const MemoryClient& asking, int64_t num_bytes, EvictionScope what);
  // Peak activation memory since this engine's last call.
  int64_t take_activation_peak(const MemoryClient& reader);

  int64_t release_device_memory(int64_t num_bytes) override;

 private:
  struct Joined {
    MemoryClient* memory_client;
    int64_t activation_peak = 0;  // seen by other engines' calls since its own
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
  std::vector<Joined> memory_clients_;
};

}  // namespace patrickstar
