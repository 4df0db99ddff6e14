#include "bind/bind.h"

#ifdef PATRICKSTAR_WITH_CUDA
#include <cuda_runtime_api.h>
#include <nccl.h>
#endif

namespace py = pybind11;

namespace patrickstar::bind {

namespace {

#if defined(__clang__)
constexpr const char* kCompiler = "clang " __clang_version__;
#elif defined(__GNUC__)
constexpr const char* kCompiler = "gcc " __VERSION__;
#else
constexpr const char* kCompiler = "unknown";
#endif

py::dict build_info() {
  py::dict info;
  info["compiler"] = kCompiler;
  info["cplusplus"] = static_cast<int64_t>(__cplusplus);
  info["torch"] = PATRICKSTAR_TORCH_VERSION;
#ifdef PATRICKSTAR_WITH_CUDA
  info["cuda"] = std::to_string(CUDART_VERSION / 1000) + "." + std::to_string(CUDART_VERSION % 1000 / 10);
  info["nccl"] = std::to_string(NCCL_MAJOR) + "." + std::to_string(NCCL_MINOR) + "." + std::to_string(NCCL_PATCH);
#else
  info["cuda"] = py::none();
  info["nccl"] = py::none();
#endif
  return info;
}

}  // namespace

void register_build(py::module_& module) {
  module.def("build_info", &build_info,
             "Versions this module was compiled with: compiler, cplusplus, torch; cuda and nccl, or None.");
}

}  // namespace patrickstar::bind
