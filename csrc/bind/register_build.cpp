#include "bind/bind.h"
#include "torch_api/attached_torch.h"

#ifdef PATRICKSTAR_WITH_CUDA
#include <cuda_runtime_api.h>
#include <nccl.h>
#endif

namespace nb = nanobind;

namespace patrickstar::bind {

namespace {

#if defined(__clang__)
constexpr const char* kCompiler = "clang " __clang_version__;
#elif defined(__GNUC__)
constexpr const char* kCompiler = "gcc " __VERSION__;
#else
constexpr const char* kCompiler = "unknown";
#endif

nb::dict build_info() {
  nb::dict info;
  info["compiler"] = kCompiler;
  info["cplusplus"] = static_cast<int64_t>(__cplusplus);
  const TorchApi* const torch = attached_torch();
  info["torch"] = torch == nullptr ? nb::object(nb::none()) : nb::str(torch->torch_version());
#ifdef PATRICKSTAR_WITH_CUDA
  info["cuda"] = std::to_string(CUDART_VERSION / 1000) + "." + std::to_string(CUDART_VERSION % 1000 / 10);
  info["nccl"] = std::to_string(NCCL_MAJOR) + "." + std::to_string(NCCL_MINOR) + "." + std::to_string(NCCL_PATCH);
#else
  info["cuda"] = nb::none();
  info["nccl"] = nb::none();
#endif
  return info;
}

}  // namespace

void register_build(nb::module_& module) {
  module.def("build_info", &build_info,
             "Versions this module was compiled with: compiler, cplusplus; cuda and nccl, or None. torch: version that "
             "the attached shim was compiled with, or None.");
  module.def("attach_torch", &attach_torch, nb::arg("path"),
             "Loads the shim at path, which must match the imported PyTorch. Raises StateError if another one is "
             "attached.");
  set_torch_loader([] {
    const nb::gil_scoped_acquire gil;
    nb::module_::import_("patrickstar.torch_shim").attr("attach")();
  });
}

}  // namespace patrickstar::bind
