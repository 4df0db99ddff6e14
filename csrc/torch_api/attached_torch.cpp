#include "torch_api/attached_torch.h"

#include <dlfcn.h>

#include <atomic>
#include <mutex>
#include <utility>

#include "common/check.h"

namespace patrickstar {

namespace {

std::atomic<const TorchApi*> attached{nullptr};

// Leaked: the process may exit on any thread.
std::function<void()>& loader() {
  static auto* function = new std::function<void()>;
  return *function;
}

}  // namespace

void attach_torch(const std::string& path) {
  void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  PS_CHECK(library != nullptr, SystemError, "the shim for this PyTorch cannot be loaded: ", dlerror());
  const auto entry = reinterpret_cast<const TorchApi* (*)()>(dlsym(library, "patrickstar_torch_api"));
  PS_CHECK(entry != nullptr, StateError, path, " is no shim of PatrickStar");
  const TorchApi* const api = entry();
  PS_CHECK(api->api_version() == kTorchApiVersion, StateError, path, " has interface ", api->api_version(),
           " and this core needs ", kTorchApiVersion, "; compile it again: python -m patrickstar.torch_shim");
  const TorchApi* before = nullptr;
  PS_CHECK(attached.compare_exchange_strong(before, api) || before == api, StateError,
           "another shim is attached, for PyTorch ", before->torch_version());
}

void set_torch_loader(std::function<void()> function) { loader() = std::move(function); }

const TorchApi* attached_torch() { return attached.load(std::memory_order_acquire); }

const TorchApi& torch_api() {
  const TorchApi* api = attached_torch();
  if (api == nullptr) {
    if (loader()) loader()();
    api = attached_torch();
    PS_CHECK(api != nullptr, StateError, "PyTorch is not attached to PatrickStar's core; import patrickstar first");
  }
  return *api;
}

const CudaApi& cuda_api() {
  const CudaApi* const cuda = torch_api().cuda();
  PS_CHECK(cuda != nullptr, StateError, "the shim for PyTorch ", torch_api().torch_version(),
           " was built without CUDA");
  return *cuda;
}

}  // namespace patrickstar
