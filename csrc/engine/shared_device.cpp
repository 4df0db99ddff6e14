#include "engine/shared_device.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <utility>

#include "common/check.h"
#include "common/sizes.h"
#include "memory/interleave.h"

namespace patrickstar {

namespace {

std::unique_ptr<Backend> make_backend(const DeviceOptions& options) {
#ifdef PATRICKSTAR_WITH_CUDA
  if (options.cuda_device >= 0) {
    return make_cuda_backend(options.cuda_device, options.device_limit_bytes, options.limit_rounding_bytes);
  }
#endif
  PS_CHECK(options.cuda_device < 0, ArgumentError,
           "this build of PatrickStar has no CUDA part; build it with a CUDA "
           "PyTorch and nvcc (python -m patrickstar.env says what is missing)");
  return make_cpu_backend(options.device_limit_bytes, options.left_by_activations_bytes, options.follows_activations);
}

std::unique_ptr<optim::Compute> make_device_compute(const DeviceOptions& options) {
#ifdef PATRICKSTAR_WITH_CUDA
  if (options.cuda_device >= 0) return optim::make_cuda_compute(options.cuda_device);
#endif
  (void)options;
  return nullptr;
}

std::unique_ptr<quant::Compute> make_device_quantizer(const DeviceOptions& options) {
#ifdef PATRICKSTAR_WITH_CUDA
  if (options.cuda_device >= 0) return quant::make_cuda_compute(options.cuda_device);
#endif
  (void)options;
  return nullptr;
}

struct Registry {
  std::mutex opening;  // at most one device is being made at a time
  std::mutex mutex;
  std::map<int, std::weak_ptr<SharedDevice>> devices;  // by cuda_device
};

Registry& registry() {
  static Registry instance;
  return instance;
}

}  // namespace

std::shared_ptr<SharedDevice> SharedDevice::find(int cuda_device) {
  const std::lock_guard<std::mutex> lock(registry().mutex);
  std::shared_ptr<SharedDevice> device = registry().devices[cuda_device].lock();
  PS_CHECK(device == nullptr || device->made_in_.is_here(), StateError,
           "this process is a fork of one that has an engine open, and has none of its threads; open engines in the "
           "process that has them, or in one that was started anew (multiprocessing's \"spawn\")");
  return device;
}

std::shared_ptr<SharedDevice> SharedDevice::open(const DeviceOptions& options) {
  const std::lock_guard<std::mutex> opening(registry().opening);
  std::shared_ptr<SharedDevice> device = find(options.cuda_device);
  if (device != nullptr) {
    device->check_same(options);
    return device;
  }
  device = std::make_shared<SharedDevice>(options);
  const std::lock_guard<std::mutex> lock(registry().mutex);
  registry().devices[options.cuda_device] = device;
  return device;
}

void SharedDevice::check_same(const DeviceOptions& options) const {
  const auto shown = [](int64_t limit) { return limit == kUnlimited ? "unlimited" : show_exactly(limit); };
  const auto check = [&](const char* name, int64_t theirs, int64_t mine) {
    PS_CHECK(theirs == mine, ArgumentError, name, " is ", shown(mine),
             ", but an engine that is open in this process has ", shown(theirs),
             ", and all engines of a process share one budget; give both the same, or leave it out of the later one");
  };
  check("device_memory", options_.device_limit_bytes, options.device_limit_bytes);
  check("host_memory", options_.host_limit_bytes, options.host_limit_bytes);
}

SharedDevice::SharedDevice(const DeviceOptions& options)
    : options_(options),
      backend_(make_delaying_backend(make_backend(options), options.delays)),
      host_threads_(choose_host_threads(read_cpu_topology(allowed_cpus()), options.host_threads)),
      pool_(host_threads_.num_threads, host_threads_.worker_cpus, host_threads_.priority),
      host_compute_(optim::make_host_compute(pool_)),
      cuda_compute_(make_device_compute(options)),
      host_quantizer_(quant::make_host_compute(pool_)),
      cuda_quantizer_(make_device_quantizer(options)),
      interleaved_nodes_(nodes_to_interleave(host_threads_.nodes)),
      host_budget_(std::make_shared<HostBudget>(options.host_limit_bytes)) {
  backend_->set_pressure_handler(this);
}

SharedDevice::~SharedDevice() {
  backend_->set_pressure_handler(nullptr);
  try {
    backend_->shut_down();
  } catch (const std::exception&) {  // the device has failed
  }
}

// First touch by all threads, then pinning: cudaHostRegister on untouched memory takes three times as long (no record
// of the measurement).
std::unique_ptr<HostArena> SharedDevice::make_arena() {
  RegionHooks hooks;
  if (!interleaved_nodes_.empty()) {
    hooks.place = [this](void* data, int64_t num_bytes) { interleave_pages(data, num_bytes, interleaved_nodes_); };
  }
  if (is_cuda()) {
    hooks.prepare = [this](void* data, int64_t num_bytes) {
      const auto touch = [data](int64_t begin, int64_t end) {
        std::memset(static_cast<char*>(data) + begin, 0, static_cast<size_t>(end - begin));
      };
      pool_.parallel_for(num_bytes, kCopyGrain, touch, Priority::kBackground);
      backend_->pin(data, num_bytes);
    };
    hooks.dispose = backend_->unpinner();
  }
  return std::make_unique<HostArena>(host_budget_, std::move(hooks));
}

void SharedDevice::join(MemoryClient& memory_client) { memory_clients_.push_back({&memory_client}); }

void SharedDevice::leave(MemoryClient& memory_client) {
  memory_clients_.erase(
      std::remove_if(memory_clients_.begin(), memory_clients_.end(),
                     [&memory_client](const Joined& joined) { return joined.memory_client == &memory_client; }),
      memory_clients_.end());
}

OthersBytes SharedDevice::others_bytes(const MemoryClient& asking) const {
  OthersBytes bytes;
  for (const Joined& joined : memory_clients_) {
    if (joined.memory_client == &asking) continue;
    bytes.states += joined.memory_client->state_bytes();
    bytes.values += joined.memory_client->value_bytes();
  }
  return bytes;
}

int64_t SharedDevice::take_from_others(const MemoryClient& asking, int64_t num_bytes, EvictionScope what) {
  int64_t freed = 0;
  for (const bool running : {false, true}) {
    for (const Joined& joined : memory_clients_) {
      MemoryClient& memory_client = *joined.memory_client;
      if (&memory_client == &asking || memory_client.is_running() != running) continue;
      freed += memory_client.trim(num_bytes - freed);
      if (freed < num_bytes) freed += memory_client.give_up(num_bytes - freed, what);
      if (freed >= num_bytes) return freed;
    }
  }
  return freed;
}

int64_t SharedDevice::take_activation_peak(const MemoryClient& reader) {
  const int64_t peak = backend_->take_activation_peak();
  int64_t highest = peak;
  for (Joined& joined : memory_clients_) {
    joined.activation_peak = std::max(joined.activation_peak, peak);
    if (joined.memory_client == &reader) highest = std::exchange(joined.activation_peak, 0);
  }
  return highest;
}

int64_t SharedDevice::release_device_memory(int64_t num_bytes) {
  // On CUDA this thread holds the lock of PyTorch's allocator, for which the owner of this lock may be waiting. Giving
  // up after 50 ms (not measured) breaks that deadlock.
  const std::unique_lock<Lock> lock(*lock_, std::chrono::milliseconds(50));
  if (!lock.owns_lock()) return 0;
  int64_t freed = 0;
  for (const Joined& joined : memory_clients_) freed += joined.memory_client->trim(num_bytes - freed);
  for (const bool running : {false, true}) {
    for (const Joined& joined : memory_clients_) {
      const EvictionScope what = running ? EvictionScope::kEverything : EvictionScope::kValues;
      if (freed < num_bytes && joined.memory_client->is_running() == running) {
        freed += joined.memory_client->give_up(num_bytes - freed, what);
      }
    }
  }
  for (const Joined& joined : memory_clients_) {
    if (freed < num_bytes) freed += joined.memory_client->give_up(num_bytes - freed, EvictionScope::kEverything);
  }
  return freed;
}

}  // namespace patrickstar
