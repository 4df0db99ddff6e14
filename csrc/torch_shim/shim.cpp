// Autograd, storages and the CPU allocator of the PyTorch that this file is compiled against.
#include <c10/core/CPUAllocator.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <cstring>
#include <string>

#include "torch_shim/parts.h"

namespace patrickstar {

namespace {

// PyTorch can make a StorageImpl refuse access with a message (used for fake tensors), but has no public way back
// before 2.13. An explicit instantiation may name a private member; this one reaches the flag in every version since
// 2.6.
bool& refuses_access(c10::StorageImpl& storage);

template <bool c10::StorageImpl::* Member>
struct FlagAccess {
  friend bool& refuses_access(c10::StorageImpl& storage) { return storage.*Member; }
};
template struct FlagAccess<&c10::StorageImpl::throw_on_immutable_data_ptr_>;

// No deleter: the memory belongs to the core, and the storage cannot be resized.
c10::DataPtr borrowed(void* data, c10::Device device) { return {data, device}; }

c10::StorageImpl* impl(void* storage) { return static_cast<c10::StorageImpl*>(storage); }

std::atomic<c10::DeleterFnPtr> base_deleter{nullptr};
std::atomic<void (*)(void*)> on_free{nullptr};

void free_metered(void* data) {
  on_free.load()(data);
  base_deleter.load()(data);
}

class MeteredAllocator final : public c10::Allocator {
 public:
  void install(CpuMemoryMeter* meter) {
    base_ = c10::GetCPUAllocator();
    base_deleter = base_->raw_deleter();
    meter_ = meter;
    // The highest priority. An allocator set earlier stays underneath and is restored.
    c10::SetCPUAllocator(this, /*priority=*/255);
  }
  void remove() {
    meter_ = nullptr;
    if (c10::GetCPUAllocator() == this) c10::SetCPUAllocator(base_, /*priority=*/255);
  }

  c10::DataPtr allocate(size_t num_bytes) override {
    CpuMemoryMeter* const meter = meter_;
    if (num_bytes == 0 || meter == nullptr || !meter->counts_this_thread()) return base_->allocate(num_bytes);
    const auto bytes = static_cast<int64_t>(num_bytes);
    if (const char* refusal = meter->refusal(bytes)) {
      throw c10::OutOfMemoryError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, refusal);
    }
    c10::DataPtr memory = base_->allocate(num_bytes);
    if (!memory.compare_exchange_deleter(base_->raw_deleter(), &free_metered)) return memory;  // not plain memory
    meter->add(memory.get(), bytes);
    return memory;
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_metered; }
  void copy_data(void* to, const void* from, std::size_t count) const override { std::memcpy(to, from, count); }

 private:
  std::atomic<CpuMemoryMeter*> meter_{nullptr};
  c10::Allocator* base_ = nullptr;
};

// Leaked: PyTorch may ask for the allocator while the process exits.
MeteredAllocator& metered_allocator() {
  static auto* allocator = new MeteredAllocator;
  return *allocator;
}

class Shim final : public TorchApi {
 public:
  int api_version() const override { return kTorchApiVersion; }
  const char* torch_version() const override { return PATRICKSTAR_TORCH_VERSION; }

  bool is_grad_enabled() const override { return c10::GradMode::is_enabled(); }
  bool is_inference_mode() const override { return c10::InferenceMode::is_enabled(); }
  uint32_t version_of(const void* tensor) const override {
    auto* const implementation = static_cast<c10::TensorImpl*>(const_cast<void*>(tensor));
    return implementation->is_inference() ? 0 : implementation->version_counter().current_version();
  }

  void claim_storage(void* storage, int64_t num_bytes, const char* absent_message) const override {
    c10::raw::intrusive_ptr::incref(impl(storage));
    impl(storage)->set_nbytes(num_bytes);
    impl(storage)->release_data_and_set_meta_custom_data_ptr_error_msg_(std::string(absent_message));
    attach_storage(storage, nullptr);
  }
  void attach_storage(void* storage, void* data) const override {
    refuses_access(*impl(storage)) = false;
    impl(storage)->set_data_ptr_noswap(borrowed(data, impl(storage)->device()));
  }
  void detach_storage(void* storage) const override {
    const c10::Device device = impl(storage)->device();
    refuses_access(*impl(storage)) = true;
    // also refreshes the check of mutable access
    impl(storage)->set_data_ptr_noswap(borrowed(nullptr, device));
  }
  void release_storage(void* storage) const override { c10::raw::intrusive_ptr::decref(impl(storage)); }

  MeterInstalled meter_cpu_memory(CpuMemoryMeter* meter, void (*freed)(void*)) const override {
    const c10::DeleterFnPtr deleter = c10::GetCPUAllocator()->raw_deleter();
    if (deleter == nullptr) return MeterInstalled::kNoRawDeleter;
    if (deleter == &free_metered) return MeterInstalled::kAnotherMeter;
    on_free = freed;
    metered_allocator().install(meter);
    return MeterInstalled::kYes;
  }
  void stop_metering() const override { metered_allocator().remove(); }

  TorchGroup* open_group(const char* name) const override { return shim::open_group(name); }
  const CudaApi* cuda() const override { return shim::cuda_api(); }
};

}  // namespace

}  // namespace patrickstar

const patrickstar::TorchApi* patrickstar_torch_api() {
  static const auto* api = new patrickstar::Shim;
  return api;
}
