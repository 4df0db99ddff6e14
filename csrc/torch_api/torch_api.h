// Everything that the core asks of PyTorch, in plain types. The core is compiled once; a shim (csrc/torch_shim) is
// compiled for one minor version of PyTorch and implements this interface against its headers.
//
// Both sides may come from different compilers: only plain types, abstract classes and exceptions derived from
// std::exception cross. Streams are cudaStream_t, devices are indices, memory is host memory unless a comment says
// otherwise.
#pragma once

#include <cstdint>

namespace patrickstar {

// A shim with another number is refused. Increase it with every change of this file.
constexpr int kTorchApiVersion = 1;

// Counts the allocations of PyTorch's CPU allocator. Called on any thread.
class CpuMemoryMeter {
 public:
  virtual bool counts_this_thread() const = 0;
  // Asked before an allocation. Returns null, or the message of the OutOfMemoryError to raise; the thread's next call
  // overwrites it.
  virtual const char* refusal(int64_t num_bytes) = 0;
  virtual void add(void* data, int64_t num_bytes) = 0;

 protected:
  ~CpuMemoryMeter() = default;
};

enum class MeterInstalled : int { kYes, kNoRawDeleter, kAnotherMeter };

// A running message between two ranks.
class TorchMessage {
 public:
  virtual ~TorchMessage() = default;
  // False if it was aborted. 0 milliseconds: the group's own timeout. Throws on failure.
  virtual bool wait(int64_t milliseconds) = 0;
  virtual void abort() = 0;
};

// The CPU backend of a group of torch.distributed.
class TorchGroup {
 public:
  virtual ~TorchGroup() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  // The caller owns the message, and keeps the memory until it is over.
  virtual TorchMessage* send(void* data, int64_t num_bytes, int peer, int tag) = 0;
  virtual TorchMessage* receive(void* data, int64_t num_bytes, int peer, int tag) = 0;
};

// Told by PyTorch's caching allocator, with its lock held.
class CudaMemoryListener {
 public:
  virtual void requested(int device, int64_t num_bytes, bool is_granted) = 0;
  virtual void unmapped(int device) = 0;
  // Called on a cache miss, before the driver is asked. True if memory was freed.
  virtual bool free_memory() = 0;

 protected:
  ~CudaMemoryListener() = default;
};

struct CudaMemory {  // bytes of one device
  int64_t reserved;
  int64_t peak_reserved;
  int64_t allocated;
  int64_t peak_allocated;
};

struct CudaBlocks {          // blocks of more than 1 MiB that belong to one stream
  int64_t reserved = 0;      // bytes of their segments
  int64_t largest_free = 0;  // bytes
};

class CudaApi {
 public:
  virtual int num_devices() const = 0;
  // Makes a device current for the thread; returns the one before.
  virtual int exchange_device(int device) const = 0;
  virtual void restore_device(int device) const noexcept = 0;
  virtual void* current_stream(int device) const = 0;
  // Calls task(context) while `stream` is PyTorch's current stream.
  virtual void run_on_stream(int device, void* stream, void (*task)(void*), void* context) const = 0;

  // Device memory of the caching allocator, for use on `stream`. Null if there is no room.
  virtual void* allocate(int64_t num_bytes, void* stream) const = 0;
  virtual void free(void* data) const = 0;
  virtual void empty_cache() const = 0;
  virtual void limit_memory(int device, double fraction) const = 0;
  virtual CudaMemory memory(int device) const = 0;
  virtual void reset_peaks(int device) const = 0;
  virtual CudaBlocks blocks(int device, void* stream) const = 0;
  // For the rest of the process.
  virtual void set_listener(CudaMemoryListener* listener) const = 0;

 protected:
  ~CudaApi() = default;
};

class TorchApi {
 public:
  virtual int api_version() const = 0;  // stays the first function
  virtual const char* torch_version() const = 0;

  virtual bool is_grad_enabled() const = 0;
  virtual bool is_inference_mode() const = 0;
  // `tensor`: a live c10::TensorImpl. 0 for inference tensors, which have no version.
  virtual uint32_t version_of(const void* tensor) const = 0;

  // `storage`: a live c10::StorageImpl. It becomes `num_bytes` long, without memory. Keeps a reference until released.
  virtual void claim_storage(void* storage, int64_t num_bytes, const char* absent_message) const = 0;
  virtual void attach_storage(void* storage, void* data) const = 0;
  // Access raises absent_message from now on.
  virtual void detach_storage(void* storage) const = 0;
  virtual void release_storage(void* storage) const = 0;

  // Until stop_metering(). `freed` is told each address of the allocator, also later ones.
  virtual MeterInstalled meter_cpu_memory(CpuMemoryMeter* meter, void (*freed)(void* data)) const = 0;
  virtual void stop_metering() const = 0;

  // The caller owns the group. Throws if there is none of that name with a CPU backend. Null if this PyTorch has no
  // torch.distributed with gloo.
  virtual TorchGroup* open_group(const char* name) const = 0;

  // Null without CUDA.
  virtual const CudaApi* cuda() const = 0;

 protected:
  ~TorchApi() = default;
};

}  // namespace patrickstar

// The only symbol of a shim.
extern "C" __attribute__((visibility("default"))) const patrickstar::TorchApi* patrickstar_torch_api();
