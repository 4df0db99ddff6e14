#include "bind/bind.h"
#ifdef PATRICKSTAR_WITH_CUDA
#include "fp8/cuda_groups.h"
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
  fp8.def(
      "cuda_cast_rows",
      [](Address x, int64_t num_rows, int64_t num_columns, Address codes, Address scales, Address stream) {
        cuda::cast_rows(pointer<const void>(x), {num_rows, num_columns, pointer<void>(codes), pointer<float>(scales)},
                        reinterpret_cast<cudaStream_t>(stream));
      },
      "Casts the rows of bfloat16 ``x``.", nb::arg("x"), nb::arg("num_rows"), nb::arg("num_columns"), nb::arg("codes"),
      nb::arg("scales"), nb::arg("stream"), ReleaseGil());
  fp8.def(
      "cuda_cast_swiglu",
      [](Address gate_up, int64_t num_rows, int64_t num_columns, Address codes, Address scales, Address stream) {
        cuda::cast_swiglu(pointer<const void>(gate_up),
                          {num_rows, num_columns, pointer<void>(codes), pointer<float>(scales)},
                          reinterpret_cast<cudaStream_t>(stream));
      },
      "Casts SwiGLU of rows that hold gate and up side by side. ``num_columns``: of the codes.", nb::arg("gate_up"),
      nb::arg("num_rows"), nb::arg("num_columns"), nb::arg("codes"), nb::arg("scales"), nb::arg("stream"),
      ReleaseGil());
  fp8.def(
      "cuda_cast_swiglu_gradient",
      [](Address gate_up, Address grad_out, int64_t num_rows, int64_t num_columns, Address codes, Address scales,
         Address stream) {
        cuda::cast_swiglu_gradient(pointer<const void>(gate_up), pointer<const void>(grad_out),
                                   {num_rows, num_columns, pointer<void>(codes), pointer<float>(scales)},
                                   reinterpret_cast<cudaStream_t>(stream));
      },
      "Casts the gradient of SwiGLU's argument. ``num_columns``: of the codes.", nb::arg("gate_up"),
      nb::arg("grad_out"), nb::arg("num_rows"), nb::arg("num_columns"), nb::arg("codes"), nb::arg("scales"),
      nb::arg("stream"), ReleaseGil());
  fp8.def(
      "cuda_cast_weighted",
      [](Address grad_out, Address rows, Address tokens, Address weights, Address grad_weights, int64_t num_rows,
         int64_t num_columns, Address codes, Address scales, Address stream) {
        cuda::cast_weighted({pointer<const void>(grad_out), pointer<const void>(rows), pointer<const int64_t>(tokens),
                             pointer<const float>(weights), pointer<float>(grad_weights)},
                            {num_rows, num_columns, pointer<void>(codes), pointer<float>(scales)},
                            reinterpret_cast<cudaStream_t>(stream));
      },
      "Casts the gradient of rows whose weighted sum is taken.", nb::arg("grad_out"), nb::arg("rows"),
      nb::arg("tokens"), nb::arg("weights"), nb::arg("grad_weights"), nb::arg("num_rows"), nb::arg("num_columns"),
      nb::arg("codes"), nb::arg("scales"), nb::arg("stream"), ReleaseGil());
  fp8.def(
      "cuda_turn",
      [](Address x, Address scales, Address sources, Address ends, Address padded_ends, int64_t num_groups,
         int64_t num_tiles, int64_t num_columns, Address codes, Address code_scales, Address largest, Address stream) {
        cuda::turn({pointer<const void>(x), pointer<const float>(scales), pointer<const int64_t>(sources),
                    pointer<const int32_t>(ends), pointer<const int32_t>(padded_ends), num_groups, num_tiles,
                    num_columns, pointer<void>(codes), pointer<float>(code_scales), pointer<uint32_t>(largest)},
                   reinterpret_cast<cudaStream_t>(stream));
      },
      "Rows of groups, bfloat16 or codes, as columns of codes. ``scales`` of 0: ``x`` is bfloat16.", nb::arg("x"),
      nb::arg("scales"), nb::arg("sources"), nb::arg("ends"), nb::arg("padded_ends"), nb::arg("num_groups"),
      nb::arg("num_tiles"), nb::arg("num_columns"), nb::arg("codes"), nb::arg("code_scales"), nb::arg("largest"),
      nb::arg("stream"), ReleaseGil());
#endif
}

}  // namespace patrickstar::bind
