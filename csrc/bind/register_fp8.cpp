#include "bind/bind.h"
#ifdef PATRICKSTAR_WITH_CUDA
#include "fp8/cuda_kernels.h"
#endif

namespace nb = nanobind;

namespace patrickstar::bind {

void register_fp8(nb::module_& module) {
  nb::module_ fp8 = module.def_submodule("fp8", "Casts to 8-bit floating point (fp8/cuda_kernels.h).");
#ifdef PATRICKSTAR_WITH_CUDA
  namespace cuda = patrickstar::fp8::cuda;
  fp8.def(
      "cuda_cast",
      [](Address x, int64_t num_rows, int64_t padded_rows, int64_t num_columns, int block, int format, Address codes,
         Address scales, Address transposed, Address transposed_scales, Address largest, Address stream) {
        cuda::cast({pointer<const void>(x), num_rows, padded_rows, num_columns, static_cast<cuda::Block>(block),
                    static_cast<cuda::Format>(format), pointer<void>(codes), pointer<float>(scales),
                    pointer<void>(transposed), pointer<float>(transposed_scales), pointer<uint32_t>(largest)},
                   reinterpret_cast<cudaStream_t>(stream));
      },
      "Casts bfloat16 ``x`` as :func:`patrickstar.fp8.casting.cast` does. An address of 0 leaves a result out.",
      nb::arg("x"), nb::arg("num_rows"), nb::arg("padded_rows"), nb::arg("num_columns"), nb::arg("block"),
      nb::arg("format"), nb::arg("codes"), nb::arg("scales"), nb::arg("transposed"), nb::arg("transposed_scales"),
      nb::arg("largest"), nb::arg("stream"), ReleaseGil());
#endif
}

}  // namespace patrickstar::bind
